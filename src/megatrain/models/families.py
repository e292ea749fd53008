"""The registry of architectures: where their parts are, and what was proven about them. Torch-free.

An architecture enters the table when tests/models prove, for a tiny model of it, that streamed logits and every
gradient equal those of the whole model bit for bit. Anything else is refused unless the user says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatrain.errors import ModelError


@dataclass(frozen=True)
class Family:
    """Where an architecture keeps its parts. Paths are submodule names, `layers` and `final` inside the backbone.

    Everything of the backbone that is neither in `layers` nor in `final` comes before the first layer.
    """

    architecture: str  # class of transformers, "LlamaForCausalLM"
    proof: str  # what was tried; shown by `megatrain plan`
    backbone: str = "model"
    layers: str = "layers"
    final: tuple[str, ...] = ("norm",)  # run after the last layer, each maps one hidden state to one


_PARITY = "tests/models: logits and gradients equal the whole model's, fp32 and bf16"

_PROVEN = (
    Family("LlamaForCausalLM", f"{_PARITY}; tied and untied, rotary scaling (Llama 3, SmolLM2)"),
    Family("Qwen2ForCausalLM", f"{_PARITY}; q, k, v biases, window on the upper layers"),
    Family("Qwen3ForCausalLM", f"{_PARITY}; q and k norms"),
    Family("MistralForCausalLM", f"{_PARITY}; window on all layers"),
    Family("Gemma3ForCausalLM", f"{_PARITY}; embedding scale, two rotary tables, window layers, soft-capped logits"),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.architecture: family for family in _PROVEN})


def family_of(architecture: str, allow_unproven: bool) -> Family:
    """The family of `architecture`; an unproven one is refused, or assumed to be laid out as Llama is."""
    if architecture in FAMILIES:
        return FAMILIES[architecture]
    if allow_unproven:
        return Family(architecture, "unproven: allowed by the user")
    raise ModelError(
        f"architecture {architecture} is not proven (proven: {', '.join(FAMILIES)}); "
        "train one of these, or pass --allow-unproven-architecture to run without the parity proof"
    )

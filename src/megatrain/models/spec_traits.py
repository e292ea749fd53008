"""traits_of: what a layer does that its parameters do not show, read off its modules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from megatrain.models.families import Family
from megatrain.models.spec import Carrier, Traits

_ATTENDS = ("Attention", "MLA")
# How a class that carries state along the tokens does so, by the end of its name; the first that fits.
_CARRIERS: Mapping[str, Carrier] = {
    "ShortConv": "convolution",
    "RecurrentBlock": "gates",
    "LightningAttention": "linear attention",
    "GatedDeltaNet": "delta rule",
    "DeltaAttention": "delta rule by channel",
}


def traits_of(layer: nn.Module, values: Mapping[str, Any], family: Family) -> Traits:
    """Of one layer; `values`: the settings of the model's config."""
    modules = [(path, module) for path, module in layer.named_modules() if path]
    attentions = attentions_of(layer, family)
    own = [name for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
    return Traits(
        attends=tuple(path for path, module in modules if any(module is attention for attention in attentions)),
        carries=tuple(
            (path, _carrier(type(module).__name__))
            for path, module in modules
            if type(module).__name__ in family.by_document
        ),
        bare_norms=tuple(path for path, module in modules if _is_bare_norm(module)),
        clips=values.get("clip_qkv") is not None,
        corrects_choice=any(name.endswith(("e_score_correction_bias", "expert_bias")) for name in own),
        runs_all_experts=any(_runs_all(module) for _, module in modules),
    )


def attentions_of(layer: nn.Module, family: Family) -> list[nn.Module]:
    """The modules of a layer that attend, at least by their names."""
    named = [(type(module).__name__, module) for module in layer.modules()]
    return [module for name, module in named if name.endswith(_ATTENDS) and name not in family.by_document]


def _carrier(name: str) -> Carrier:
    return next((kind for end, kind in _CARRIERS.items() if name.endswith(end)), "state space")


def _is_bare_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.parameters())


def _runs_all(module: nn.Module) -> bool:
    """Experts that are not told which of them a token chose."""
    return type(module).__name__.endswith("Experts") and len(inspect.signature(module.forward).parameters) == 1

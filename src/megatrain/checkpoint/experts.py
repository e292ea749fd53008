"""Where a tensor's values lie in a checkpoint: under its own name, an older name, or one tensor an expert.

transformers holds the experts of a layer fused, (E, 2I, H) gate over up and (E, H, I) down; published checkpoints of
most mixtures hold E times gate, up and down. Each of those is one contiguous run of the fused tensor.
Shapes: E experts, I expert width, H hidden.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatrain.models.spec import TensorSpec

_GATE_UP, _UP, _DOWN = ".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj"
_MIXTRAL = (".mlp.", ".block_sparse_moe.")
_PUBLISHED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # Qwen, DeepSeek, OLMoE …; Mixtral


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint that is elements [start, start + its size) of a tensor of the model."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def candidates(tensor: TensorSpec) -> Iterator[list[Part]]:
    """Every way a checkpoint may hold `tensor`, the plain one first."""
    for name in dict.fromkeys((tensor.name, tensor.published or tensor.name, tensor.name.replace(*_MIXTRAL))):
        yield [Part(name, tensor.shape, 0)]
        for gate, up, down in _PUBLISHED:
            if name.endswith(_GATE_UP):
                yield list(_expert_parts(name.removesuffix(_GATE_UP), tensor.shape, (gate, up)))
            elif name.endswith(_DOWN):
                yield list(_expert_parts(name.removesuffix(_DOWN), tensor.shape, (down,)))
            elif name.endswith(_UP):
                yield list(_expert_parts(name.removesuffix(_UP), tensor.shape, (up,)))


def published(tensor: TensorSpec, names: Collection[str]) -> list[Part]:
    """How a folder with tensors `names` holds `tensor`; as the one tensor it is, if the folder does not have it."""
    for parts in candidates(tensor):
        if all(part.name in names for part in parts):
            return parts
    return [Part(tensor.name, tensor.shape, 0)]


def _expert_parts(layer: str, shape: tuple[int, ...], kinds: tuple[str, ...]) -> Iterator[Part]:
    """The parts of a fused (E, len(kinds) * rows, columns) tensor, in the order of their elements."""
    num_experts, all_rows, columns = shape
    rows = all_rows // len(kinds)
    for expert in range(num_experts):
        for index, kind in enumerate(kinds):
            start = (expert * len(kinds) + index) * rows * columns
            yield Part(f"{layer}.experts.{expert}.{kind}.weight", (rows, columns), start)

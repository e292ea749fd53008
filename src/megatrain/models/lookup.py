"""The gradient of the token embedding, over the rows that a micro-batch looks up.

Autograd makes the gradient of the whole table to add a seventh of its rows: 6 V D bytes, 3.2 GB for Llama 3 8B.
Here it is 10 T D. Same bits: the framework's kernel sums the tokens of a row in the same order whatever the number of
rows, and adding the zeros of the others to an fp32 sum that began at +0 changes nothing.

Legend: T tokens of the micro-batch, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

EXTRAS = ("max_norm", "scale_grad_by_freq", "sparse")  # what makes `functional.embedding` more than a lookup


class Lookup:
    """One lookup: its ids, the id whose row learns nothing (None: no such), and the edge its gradient arrives at."""

    def __init__(self, ids: Tensor, padding_idx: int | None, edge: GradientEdge) -> None:
        self._ids_T, self._padding_idx, self.edge = ids.reshape(-1), padding_idx, edge

    def add_gradient(self, grad_VD: Tensor, drows: Tensor) -> None:
        """Add to `grad_VD` (fp32) the table's gradient, given `drows` (..., D) at the rows looked up.

        Every distinct id has a row in a table of T rows: its first place among the sorted ids.
        """
        drows_TD = drows.reshape(-1, drows.shape[-1])
        if self._padding_idx is not None:
            drows_TD = drows_TD.masked_fill((self._ids_T == self._padding_idx).unsqueeze(1), 0.0)
        sorted_T = self._ids_T.sort().values
        first_T = torch.searchsorted(sorted_T, self._ids_T)
        own_TD = torch.ops.aten.embedding_dense_backward(drows_TD, first_T, first_T.numel(), -1, False)
        grad_VD.index_add_(0, sorted_T, own_TD.float())  # an id's further places among the sorted ones add zeros


class Lookups(TorchFunctionMode):
    """While entered, notes every lookup in `table_VD` and lets it pass."""

    def __init__(self, table_VD: Tensor) -> None:
        super().__init__()
        self._table_VD = table_VD
        self._seen: list[Lookup | None] = []

    @property
    def only(self) -> Lookup | None:
        """The lookup, if there was one alone and it does nothing else; the table may then be left to it."""
        return self._seen[0] if len(self._seen) == 1 else None

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """What `func` returns."""
        named = kwargs or {}
        result = func(*args, **named)
        uses = any(isinstance(value, Tensor) and value.requires_grad for value in _parts(result))
        if uses and any(value is self._table_VD for value in _parts((args, tuple(named.values())))):
            is_plain = func is functional.embedding and len(args) == 2 and not any(map(named.get, EXTRAS))
            lookup = Lookup(args[0], named.get("padding_idx"), get_gradient_edge(result)) if is_plain else None
            self._seen.append(lookup)
        return result


def _parts(value: object) -> Iterator[object]:
    """`value`, or what is in it, where it is a list or tuple of values, of lists …"""
    if isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value

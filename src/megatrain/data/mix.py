"""Several datasets as one: how many rows of each an epoch holds, and which. Pure functions.

A part is an endless stream of its rows: its shuffle of pass 0, then that of pass 1, and so on. An epoch takes the next
`quota` rows of every part's stream, so with `repeat: 0.5` two epochs see every row once, and with `repeat: 2` one epoch
sees every row twice.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatrain.data.tokens import TokenDataset


@dataclass(frozen=True)
class Part:
    """One dataset of several. `repeat`: how often an epoch holds its rows (None: once); `weight`: the share of an
    epoch's rows that are its own, against the other weights. Either all parts have a weight, or none has."""
    dataset: TokenDataset
    repeat: float | None = None
    weight: float | None = None


def quotas(parts: Sequence[Part], num_rows: Sequence[int]) -> list[int]:
    """Rows of each part in an epoch, at least one. By weight they are shares of as many rows as all parts have."""
    weights = [part.weight for part in parts if part.weight is not None]
    if not weights:
        return [max(1, round(count * (1.0 if part.repeat is None else part.repeat)))
                for part, count in zip(parts, num_rows, strict=True)]
    assert len(weights) == len(parts), "all parts have a weight, or none has"
    return [max(1, round(sum(num_rows) * weight / sum(weights))) for weight in weights]


def stretches(epoch: int, quota: int, num_rows: int) -> Iterator[tuple[int, int, int]]:
    """(pass, first row, row behind the last) of what an epoch takes from the stream of a part with `num_rows` rows."""
    at, end = epoch * quota, (epoch + 1) * quota
    while at < end:
        number, first = divmod(at, num_rows)
        last = min(num_rows, first + end - at)
        yield number, first, last
        at += last - first

"""Order and packing: pure functions of (seed, epoch) and of lengths, vectorised, the same on every machine."""
from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np


class Bins(NamedTuple):
    """Items by bin: bin b holds `items[starts[b]:starts[b + 1]]`."""
    items: np.ndarray       # int64, every item once
    starts: np.ndarray      # int64, number of bins + 1

    @property
    def num_bins(self) -> int:
        return len(self.starts) - 1

    def of(self, index: int) -> np.ndarray:
        return self.items[self.starts[index]:self.starts[index + 1]]


def permutation(num_items: int, *key: int) -> np.ndarray:
    """A shuffle of 0 … num_items - 1, named by a key of integers ≥ 0 such as (seed, epoch).

    Sorting raw generator words instead of calling `Generator.permutation`: numpy promises the raw stream of PCG64
    for ever, but not what Generator's methods make of it, and a resume may meet another numpy.
    """
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(num_items)
    return np.argsort(words, kind="stable")


def pack(lengths: np.ndarray, order: np.ndarray, capacity: int) -> Bins:
    """Best-fit decreasing: items, longest first, each into the fullest bin that has room; ties go by `order`.

    The number of bins depends on the lengths alone, never on `order`. Bins of one free space are handled together,
    so the work grows with the number of different lengths, not of items.
    """
    sorted_items = order[np.argsort(-lengths[order], kind="stable")]
    sorted_lengths = lengths[sorted_items]
    assert not len(lengths) or (sorted_lengths[0] <= capacity and sorted_lengths[-1] > 0), "an item fits no bin"
    bin_of = np.empty(len(lengths), np.int64)
    open_bins: dict[int, list[np.ndarray]] = {}     # free space -> bins with it
    spaces: list[int] = []                          # the keys of open_bins, ascending
    num_bins = 0
    starts = np.flatnonzero(np.diff(sorted_lengths, prepend=-1))
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(lengths)], strict=True):
        length, at = int(sorted_lengths[start]), start
        while at < stop:
            found = bisect_left(spaces, length)
            if found < len(spaces):
                space = spaces.pop(found)
                bins = np.concatenate(open_bins.pop(space))
            else:
                space = capacity
                bins = np.arange(num_bins, num_bins + math.ceil((stop - at) / (capacity // length)))
                num_bins += len(bins)
            each = space // length      # the fullest bin with room stays the fullest until it has none
            count = min(stop - at, each * len(bins))
            bin_of[at:at + count] = bins[np.arange(count) // each]
            at += count
            full, over = divmod(count, each)
            _put(open_bins, spaces, space - each * length, bins[:full])
            _put(open_bins, spaces, space - over * length, bins[full:full + (over > 0)])
            _put(open_bins, spaces, space, bins[full + (over > 0):])
    by_bin = np.argsort(bin_of, kind="stable")
    counts = np.bincount(bin_of, minlength=num_bins)
    return Bins(sorted_items[by_bin], np.concatenate([[0], np.cumsum(counts)]))


def _put(open_bins: dict[int, list[np.ndarray]], spaces: list[int], space: int, bins: np.ndarray) -> None:
    if space <= 0 or not len(bins):
        return
    if space not in open_bins:
        open_bins[space] = []
        insort(spaces, space)
    open_bins[space].append(bins)

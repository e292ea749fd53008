"""Steps by index: which tokens step i trains on, in random access, as a pure function of dataset and plan.

Three units, each made of the one before: a *piece* (a run of tokens of one sample: one isolated document of a
micro-batch), a *row* (what `train_batch_size` counts: one piece, or with packing as many as fit in `max_length`), a
micro-batch (whole rows up to `micro_batch_tokens`, then padding).
"""
from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatrain.data.mix import Part, quotas, stretches
from megatrain.data.pack import Bins, pack, permutation
from megatrain.data.tokens import TokenDataset
from megatrain.errors import ConfigError, DataError

IGNORED = -100
EVAL_GROUP_ROWS = 256
ROW_SHUFFLE, MIX_SHUFFLE = 1, 2     # tell the shuffles of packed rows and of mixed datasets from that of samples
PLAN_VERSION = 2        # of everything that decides what a step holds: part of the fingerprint


@dataclass(frozen=True)
class MicroBatch:
    """What one template call sees: T = micro_batch_tokens tokens, the last ones possibly padding.

    Every document (and the padding, as one more) has its own number. Positions start at 0 in each, and those of the
    padding again and again, so that none is larger than a real one. Labels are shifted:
    `labels_T[t]` is the token to predict at t, or -100; a document's last token predicts nothing.
    """
    input_ids_T: np.ndarray         # int64
    position_ids_T: np.ndarray      # int64
    document_ids_T: np.ndarray      # int32, ascending from 0
    labels_T: np.ndarray            # int64
    num_tokens: int                 # without padding
    num_supervised: int             # labels that are not -100
    sample_ids: tuple[int, ...]     # one a document, without the padding


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one optimizer step, with their totals."""
    micro_batches: tuple[MicroBatch, ...]
    num_tokens: int
    num_supervised: int


class _Rows:
    """The pieces of a dataset and, per epoch, the rows they make."""

    def __init__(self, dataset: TokenDataset, max_length: int, packing: bool) -> None:
        self._cut_in_place = dataset.is_documents and packing
        self._packing = packing
        self._max_length = max_length
        offsets = np.asarray(dataset.offsets)
        if dataset.is_documents:
            bounds = _stream_cuts(offsets, max_length) if packing else _document_cuts(offsets, max_length)
        else:
            bounds = offsets
        self.starts, self.lengths = bounds[:-1], np.diff(bounds)
        self.sample_ids = np.searchsorted(offsets, self.starts, side="right") - 1
        if int(self.lengths.max()) > max_length:
            raise ConfigError(f"the longest sample has {int(self.lengths.max())} tokens, over max_length {max_length}; "
                              "prepare the dataset with the same max_length")
        if self._cut_in_place:      # one row is one stretch of max_length tokens of all documents in file order
            firsts = np.flatnonzero(np.diff(self.starts // max_length, prepend=-1))
            self._fixed = _useful(Bins(np.arange(len(self.starts)), np.append(firsts, len(self.starts))), self.lengths)
        else:
            useful = np.flatnonzero(self.lengths > 1)
            self._fixed = Bins(useful, np.arange(len(useful) + 1))

    @property
    def num_useful(self) -> int:
        """How many pieces, or stretches, hold something to predict; 0: there are no rows."""
        return self._fixed.num_bins

    def in_order(self) -> Bins:
        """The rows as the files have them."""
        if self._cut_in_place or not self._packing:
            return self._fixed
        return self._packed(np.arange(self._fixed.num_bins))

    def shuffled(self, seed: int, epoch: int) -> Bins:
        """The rows of an epoch, in its order; their number is the same in every epoch."""
        order = permutation(self._fixed.num_bins, seed, epoch)
        if self._cut_in_place or not self._packing:
            return _reordered(self._fixed, order)
        bins = self._packed(order)      # these come longest first: so the rows are shuffled too
        return _reordered(bins, permutation(bins.num_bins, seed, epoch, ROW_SHUFFLE))

    def _packed(self, order: np.ndarray) -> Bins:
        items = self._fixed.items
        bins = pack(self.lengths[items], order, self._max_length)
        return Bins(items[bins.items], bins.starts)


def _stream_cuts(offsets: np.ndarray, max_length: int) -> np.ndarray:
    return np.union1d(offsets, np.arange(0, int(offsets[-1]), max_length))


def _document_cuts(offsets: np.ndarray, max_length: int) -> np.ndarray:
    counts = -(-np.diff(offsets) // max_length)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.append(np.repeat(offsets[:-1], counts) + within * max_length, offsets[-1])


def _useful(rows: Bins, lengths: np.ndarray) -> Bins:
    """Without the rows in which nothing can be predicted (all pieces one token long)."""
    longest = np.maximum.reduceat(lengths[rows.items], rows.starts[:-1])
    return _reordered(rows, np.flatnonzero(longest > 1))


def _reordered(rows: Bins, order: np.ndarray) -> Bins:
    counts = np.diff(rows.starts)[order]
    starts = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    return Bins(rows.items[np.repeat(rows.starts[:-1][order], counts) + within], starts)


class _Pieces(NamedTuple):
    """The pieces of all datasets, one dataset after another, and the samples counted over all of them."""
    datasets: tuple[TokenDataset, ...]
    dataset: np.ndarray         # which one a piece is of
    starts: np.ndarray
    lengths: np.ndarray
    sample_ids: np.ndarray


def _pieces_of(datasets: Sequence[TokenDataset], rows: Sequence[_Rows]) -> _Pieces:
    firsts = np.cumsum([0, *(dataset.num_samples for dataset in datasets)])
    return _Pieces(tuple(datasets), np.repeat(np.arange(len(rows)), [len(r.starts) for r in rows]),
                   np.concatenate([r.starts for r in rows]), np.concatenate([r.lengths for r in rows]),
                   np.concatenate([r.sample_ids + first for r, first in zip(rows, firsts[:-1], strict=True)]))


class _Mix:
    """The rows of several datasets, those of one epoch in one order."""

    def __init__(self, parts: Sequence[Part], rows: Sequence[_Rows]) -> None:
        self._rows = rows
        self._num_rows = [r.shuffled(0, 0).num_bins for r in rows]
        self._bases = np.cumsum([0, *(len(r.starts) for r in rows)])[:-1]   # of the pieces of each dataset
        self.quotas = quotas(parts, self._num_rows)
        self.is_plain = len(parts) == 1 and self.quotas == self._num_rows

    def shuffled(self, seed: int, epoch: int) -> Bins:
        """The rows of an epoch, in its order."""
        if self.is_plain:
            return self._rows[0].shuffled(seed, epoch)
        items, counts = [], []
        for rows, num_rows, quota, base in zip(self._rows, self._num_rows, self.quotas, self._bases, strict=True):
            for number, first, last in stretches(epoch, quota, num_rows):
                bins = rows.shuffled(seed, number)
                starts = bins.starts[first:last + 1]
                items.append(bins.items[starts[0]:starts[-1]] + base)
                counts.append(np.diff(starts))
        mixed = Bins(np.concatenate(items), np.cumsum(np.concatenate([[0], *counts])))
        return _reordered(mixed, permutation(mixed.num_bins, seed, epoch, MIX_SHUFFLE))


class _Assembler:
    """Rows to micro-batches."""

    def __init__(self, pieces: _Pieces, micro_batch_tokens: int) -> None:
        self._pieces = pieces
        self._pad_id = pieces.datasets[0].pad_id
        self._size = micro_batch_tokens

    def micro_batches(self, rows: Sequence[np.ndarray]) -> tuple[MicroBatch, ...]:
        """Whole rows into as few micro-batches as best fit finds."""
        sizes = np.array([int(self._pieces.lengths[row].sum()) for row in rows])
        bins = pack(sizes, np.arange(len(rows)), self._size)
        return tuple(self._build(np.concatenate([rows[i] for i in bins.of(b)]))
                     for b in range(bins.num_bins))

    def _build(self, pieces: np.ndarray) -> MicroBatch:
        input_ids_T = np.full(self._size, self._pad_id, np.int64)
        position_ids_T = np.empty(self._size, np.int64)
        document_ids_T = np.full(self._size, len(pieces), np.int32)
        labels_T = np.full(self._size, IGNORED, np.int64)
        at = 0
        for document, piece in enumerate(pieces):
            dataset = self._pieces.datasets[self._pieces.dataset[piece]]
            start, length = int(self._pieces.starts[piece]), int(self._pieces.lengths[piece])
            tokens = dataset.tokens[start:start + length].astype(np.int64)
            input_ids_T[at:at + length] = tokens
            position_ids_T[at:at + length] = np.arange(length)
            document_ids_T[at:at + length] = document
            trained = dataset.trained(start + 1, start + length)
            labels_T[at:at + length - 1] = np.where(trained, tokens[1:], IGNORED)
            at += length
        # No position beyond those of real documents: learned positions end there, and rotary scalings that look at the
        # largest position of a pack (dynamic, LongRoPE) would change real tokens for the padding's sake.
        longest = int(self._pieces.lengths[pieces].max())
        position_ids_T[at:] = np.arange(self._size - at) % longest
        return MicroBatch(input_ids_T, position_ids_T, document_ids_T, labels_T, num_tokens=at,
                          num_supervised=int(np.count_nonzero(labels_T != IGNORED)),
                          sample_ids=tuple(self._pieces.sample_ids[pieces].tolist()))


class BatchPlan:
    """What every step of a run trains on, known before the first: `step(i)` in any order, nothing to skip at resume.

    The order of an epoch depends on (seed, epoch) alone. Every sample comes once an epoch; an epoch's last step holds
    the rows that are left, `train_batch_size` or fewer. Give `num_epochs` (a fraction is rounded up to a whole step) or
    `max_steps`, which goes on into as many epochs as it needs. Several datasets are `mix.Part`s: an epoch holds
    `rows_by_part` rows of each, and a row never holds samples of two.
    """

    def __init__(self, dataset: TokenDataset | Sequence[Part], *, max_length: int, packing: bool, train_batch_size: int,
                 micro_batch_tokens: int, seed: int, num_epochs: float | None = None,
                 max_steps: int | None = None) -> None:
        if (num_epochs is None) == (max_steps is None):
            raise ConfigError("give either num_train_epochs or max_steps, not both or none")
        for name, value in (("train_batch_size", train_batch_size), ("num_train_epochs", num_epochs),
                            ("max_steps", max_steps)):
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")
        if seed < 0:
            raise ConfigError(f"seed is {seed}; it must not be below 0")
        parts = [Part(dataset)] if isinstance(dataset, TokenDataset) else list(dataset)
        datasets = [part.dataset for part in parts]
        rows = [_Rows(one, max_length, packing) for one in datasets]
        for one, its_rows in zip(datasets, rows, strict=True):
            _check_rows(one, its_rows, its_rows.num_useful, max_length, packing, micro_batch_tokens)
        mix = _Mix(parts, rows)
        self._assembler = _Assembler(_pieces_of(datasets, rows), micro_batch_tokens)
        self._batch_rows = train_batch_size
        self.rows_by_part = tuple(mix.quotas)
        self.num_rows = num_rows = sum(mix.quotas)
        self.steps_per_epoch = math.ceil(num_rows / train_batch_size)
        self.num_steps = max_steps if num_epochs is None else math.ceil(num_epochs * self.steps_per_epoch)
        self.fingerprint = hashlib.sha256(json.dumps([
            PLAN_VERSION, _name_of(datasets, mix), datasets[0].pad_id, max_length, packing, train_batch_size,
            micro_batch_tokens, seed]).encode()).hexdigest()
        self._epoch = lru_cache(maxsize=2)(lambda epoch: mix.shuffled(seed, epoch))

    def step(self, index: int) -> StepBatch:
        """The batch of step `index` (from 0)."""
        if not 0 <= index < self.num_steps:
            raise IndexError(f"step {index} of {self.num_steps}")
        epoch, step = divmod(index, self.steps_per_epoch)
        rows = self._epoch(epoch)
        first = step * self._batch_rows
        last = min(first + self._batch_rows, rows.num_bins)
        micro_batches = self._assembler.micro_batches([rows.of(r) for r in range(first, last)])
        return StepBatch(micro_batches, num_tokens=sum(m.num_tokens for m in micro_batches),
                         num_supervised=sum(m.num_supervised for m in micro_batches))


def _name_of(datasets: Sequence[TokenDataset], mix: _Mix) -> str | list[tuple[str, int]]:
    """What the data of a plan are, for its fingerprint."""
    if mix.is_plain:
        return datasets[0].digest
    return [(dataset.digest, quota) for dataset, quota in zip(datasets, mix.quotas, strict=True)]


def eval_micro_batches(dataset: TokenDataset, *, max_length: int, packing: bool,
                       micro_batch_tokens: int) -> Iterator[MicroBatch]:
    """Every sample of the dataset once, in an order that never changes."""
    rows = _Rows(dataset, max_length, packing)
    bins = rows.in_order()
    _check_rows(dataset, rows, bins.num_bins, max_length, packing, micro_batch_tokens)
    assembler = _Assembler(_pieces_of([dataset], [rows]), micro_batch_tokens)
    for first in range(0, bins.num_bins, EVAL_GROUP_ROWS):
        yield from assembler.micro_batches([bins.of(r) for r in
                                            range(first, min(first + EVAL_GROUP_ROWS, bins.num_bins))])


def _check_rows(dataset: TokenDataset, rows: _Rows, num_rows: int, max_length: int, packing: bool,
                micro_batch_tokens: int) -> None:
    if not num_rows:
        raise DataError(f"dataset {', '.join(dataset.files)} leaves no row in which a token can be predicted")
    longest = max_length if packing else int(rows.lengths.max())
    if longest > micro_batch_tokens:
        raise ConfigError(f"micro_batch_tokens is {micro_batch_tokens}, but a row has up to {longest} tokens and is "
                          f"never split; set micro_batch_tokens to at least {longest}, or lower max_length")

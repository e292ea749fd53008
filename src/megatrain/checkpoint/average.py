"""The running average of the masters, kind "ema", which a run keeps only if it is asked to (`ema_decay`)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatrain.checkpoint.commit import Checkpoint
from megatrain.checkpoint.fs import BLOCK_BYTES
from megatrain.models.layout import Entry
from megatrain.store import SegmentStore

KIND = "ema"
CHUNK_ELEMENTS = BLOCK_BYTES // 4


def has_average(checkpoint: Checkpoint) -> bool:
    """Whether the run kept an average when it saved this checkpoint."""
    return KIND in checkpoint.manifest.get("state_kinds", ())  # no such list: saved before there were averages


def start_averages(store: SegmentStore) -> None:
    """The averages begin at the masters that are in `store`."""
    _set_masters(store, store.master)


def take_averages(store: SegmentStore) -> None:
    """Puts the averages in the masters' place: what is written from `store` from now on is the averaged model."""

    def average(segment: str, entry: Entry, start: int, stop: int) -> Tensor:
        return store.flat(segment, KIND)[entry.offset + start : entry.offset + stop].cpu()

    _set_masters(store, average)


def _set_masters(store: SegmentStore, values: Callable[[str, Entry, int, int], Tensor]) -> None:
    """Sets every trained tensor, piece by piece, to `values(segment, entry, start, stop)`, and its average too."""
    for segment, layout in store.layouts.items():
        with store.visit(segment, "w", "lo", KIND, write=True):
            for entry in layout.entries:
                end = entry.tensor.num_elements if entry.tensor.trainable else 0
                for start in range(0, end, CHUNK_ELEMENTS):
                    piece = values(segment, entry, start, min(start + CHUNK_ELEMENTS, end))
                    store.set_master(segment, entry, piece, start)

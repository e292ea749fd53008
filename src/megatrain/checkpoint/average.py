"""The running average of the masters, kind "ema", which a run keeps only if it is asked to (`ema_decay`)."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.checkpoint.commit import Checkpoint
from megatrain.checkpoint.fs import BLOCK_BYTES
from megatrain.models.layout import Entry, Layout
from megatrain.store import SegmentStore

KIND = "ema"
CHUNK_ELEMENTS = BLOCK_BYTES // 4


def has_average(checkpoint: Checkpoint) -> bool:
    """Whether the run kept an average when it saved this checkpoint."""
    return KIND in checkpoint.manifest.get("state_kinds", ())  # no such list: saved before there were averages


def start_averages(store: SegmentStore) -> None:
    """The averages begin at the masters that are in `store`; of what lives on the disk nothing else is written."""
    for segment, layout in store.layouts.items():
        with store.visit(segment, "w", "lo", KIND):
            for entry, start, stop in _pieces(layout):
                piece = store.master(segment, entry, start, stop)
                store.flat(segment, KIND)[entry.offset + start : entry.offset + stop].copy_(piece)
            if KIND in store.on_disk(segment):
                store.spill(segment, {KIND: 0})  # where a visit has it


def take_averages(store: SegmentStore) -> None:
    """Puts the averages in the masters' place: what is written from `store` from now on is the averaged model."""
    for segment, layout in store.layouts.items():
        with store.visit(segment, "w", "lo", KIND, write=True):
            for entry, start, stop in _pieces(layout):
                average = store.flat(segment, KIND)[entry.offset + start : entry.offset + stop].cpu()
                store.set_master(segment, entry, average, start)


def _pieces(layout: Layout) -> Iterator[tuple[Entry, int, int]]:
    """(Entry, start, stop) of every piece of every trained tensor."""
    for entry in layout.entries:
        end = entry.tensor.num_elements if entry.tensor.trainable else 0
        for start in range(0, end, CHUNK_ELEMENTS):
            yield entry, start, min(start + CHUNK_ELEMENTS, end)

"""Bytes of what lives on disk: the landing slots in RAM, and the extents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

from megatrain.models.layout import Layout
from megatrain.schedule.plan import Plan, SegmentPlan

PAGE_BYTES = 4096

Extent = tuple[str, int]  # (kind, bytes in whole pages) of what a segment has on disk


def landing_bytes(plan: Plan, layouts: Mapping[str, Layout], compute_bytes: int) -> dict[str, int]:
    """Kind -> bytes of one landing slot in RAM: as large as the largest segment of which that kind is on disk."""
    return largest_of(extents_of(segment, layouts[segment.name], compute_bytes) for segment in plan.segments)


def largest_of(segments: Iterable[tuple[Extent, ...]]) -> dict[str, int]:
    """Kind -> the bytes of its largest extent."""
    largest: dict[str, int] = {}
    for kind, num_bytes in chain.from_iterable(segments):
        largest[kind] = max(largest.get(kind, 0), num_bytes)
    return largest


def extents_of(segment: SegmentPlan, layout: Layout, compute_bytes: int) -> tuple[Extent, ...]:
    """What a segment has on disk."""
    found = []
    if segment.weights_on_disk:
        found.append(("w", _pages(layout.num_elements * compute_bytes)))
    if segment.state_on_disk:
        sizes = layout.state_bytes(compute_bytes).items()
        found += [(kind, _pages(layout.num_trainable * size)) for kind, size in sizes]
    return tuple(found)


def loaded_bytes(plan: Plan, layouts: Mapping[str, Layout], compute_bytes: int, *, resumed: bool) -> int:
    """What loading a model writes to the disk: every home there, once; moments of a new run are zeros by themselves."""
    homes = chain.from_iterable(extents_of(segment, layouts[segment.name], compute_bytes) for segment in plan.segments)
    return sum(num_bytes for kind, num_bytes in homes if resumed or kind not in ("m", "v"))


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

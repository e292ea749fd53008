"""Bytes of what lives on disk: the landing slots in RAM, and the extents."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.models.layout import Layout
from megatrain.schedule.plan import Plan

PAGE_BYTES = 4096


def landing_bytes(plan: Plan, layouts: Mapping[str, Layout], compute_bytes: int) -> dict[str, int]:
    """Kind -> bytes of one landing slot in RAM: as large as the largest segment of which that kind is on disk."""
    largest: dict[str, int] = {}
    for _, kind, num_bytes in extents(plan, layouts, compute_bytes):
        largest[kind] = max(largest.get(kind, 0), num_bytes)
    return largest


def extents(plan: Plan, layouts: Mapping[str, Layout], compute_bytes: int) -> list[tuple[str, str, int]]:
    """(segment, kind, bytes in whole pages) of everything that lives on disk."""
    found = []
    for segment in plan.segments:
        layout = layouts[segment.name]
        if segment.weights_on_disk:
            found.append((segment.name, "w", _pages(layout.num_elements * compute_bytes)))
        if segment.state_on_disk:
            sizes = layout.state_bytes(compute_bytes).items()
            found += [(segment.name, kind, _pages(layout.num_trainable * size)) for kind, size in sizes]
    return found


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

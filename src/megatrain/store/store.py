"""SegmentStore: the home buffers of every segment. It knows where bytes lie, never when they move."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from megatrain.errors import PlanError
from megatrain.memory import HostArena, Pinned, register, unregister
from megatrain.models.layout import Entry, Layout
from megatrain.schedule.plan import Plan, SegmentPlan, Tier
from megatrain.store.master import join_master, split_master

Precision = Literal["bf16", "fp32"]

PAGE_BYTES = 4096
_DTYPES = {"lo": torch.int16, "m": torch.float32, "v": torch.float32, "grad": torch.float32}
_TRAVELS = ("w", "grad")  # what DMA reads and writes; state seldom: what the CPU alone touches needs no pinning


class SegmentStore:
    """Every segment's flat buffers, zeroed. Kinds: w; if trainable lo (bf16 only), m, v; and grad if it comes to RAM.

    A segment whose plan says state "hbm" lives on `device` alone; all others in RAM, what travels (w, grad; lo, m, v if
    the plan says update "device") pinned when `device` is a CUDA device (`pinned` says what was reached; a refusal is
    also warned of). Where the update runs on the device, the gradient stays in its slot.
    """

    def __init__(self, layouts: Sequence[Layout], precision: Precision, plan: Plan, device: torch.device) -> None:
        plans = {segment.name: segment for segment in plan.segments}
        if [layout.segment for layout in layouts] != list(plans):
            raise ValueError(f"layouts of {[x.segment for x in layouts]} for a plan of {list(plans)}")
        self.layouts: Mapping[str, Layout] = MappingProxyType({layout.segment: layout for layout in layouts})
        self.precision: Precision = precision
        self.device = device
        self.pinned: Pinned | None = None
        self._arenas: list[HostArena] = []
        self._flats: dict[tuple[str, str], Tensor] = {}
        self._tiers: dict[tuple[str, str], Tier] = {}
        table = [item for layout in layouts for item in _kinds(layout, plans[layout.segment], precision)]
        for segment, kind, count, tier in table:
            self._tiers[segment, kind] = tier
            if tier == "hbm":
                self._flats[segment, kind] = torch.zeros(count, dtype=self.dtype(kind), device=device)
        travels, stays = [], []
        for segment, kind, count, tier in table:
            if tier == "ram":
                rows = travels if kind in _TRAVELS or plans[segment].streams_state else stays
                rows.append((segment, kind, count))
        self._place(travels, pin=device.type == "cuda")
        self._place(stays, pin=False)

    def _place(self, rows: list[tuple[str, str, int]], *, pin: bool) -> None:
        """Gives each (segment, kind, count) its page-aligned part of one new arena."""
        offsets_bytes, total_bytes = [], 0
        for _, kind, count in rows:
            offsets_bytes.append(total_bytes)
            total_bytes += -(-count * self.dtype(kind).itemsize // PAGE_BYTES) * PAGE_BYTES
        if not total_bytes:
            return
        arena = HostArena(total_bytes)
        self._arenas.append(arena)
        for (segment, kind, count), offset_bytes in zip(rows, offsets_bytes, strict=True):
            self._flats[segment, kind] = arena.view(offset_bytes, count, self.dtype(kind))
        if pin:
            self.pinned = register([self._flats[segment, kind] for segment, kind, _ in rows])
            if self.pinned.refused:
                warnings.warn(f"{self.pinned.refused}; copies will be slower", stacklevel=3)

    def dtype(self, kind: str) -> torch.dtype:
        """The element type of a kind at this store's precision."""
        if kind == "w":
            return torch.bfloat16 if self.precision == "bf16" else torch.float32
        return _DTYPES[kind]

    def kinds(self, segment: str) -> tuple[str, ...]:
        """The kinds this segment has a buffer of."""
        return tuple(kind for name, kind in self._tiers if name == segment)

    def flat(self, segment: str, kind: str) -> Tensor:
        """The home buffer itself, 1-D: num_elements of w, num_trainable of the others. KeyError if there is none."""
        return self._flats[segment, kind]

    def views(self, flat: Tensor, segment: str, trainable_only: bool = False) -> dict[str, Tensor]:
        """Local name -> shaped view of `flat`, any 1-D buffer laid out like the segment (home, slot, gradient)."""
        return {
            entry.tensor.local: flat[entry.offset : entry.stop].view(entry.tensor.shape)
            for entry in self.layouts[segment].entries
            if entry.tensor.trainable or not trainable_only
        }

    def master(self, segment: str, entry: Entry, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) of one tensor's exact fp32 master: a 1-D copy in RAM. Frozen: its weights."""
        where = _within(entry, start, stop)
        w = self.flat(segment, "w")[where].cpu()
        if self.precision == "bf16" and entry.tensor.trainable:
            return join_master(w, self.flat(segment, "lo")[where].cpu())
        return w.to(torch.float32, copy=True)

    def set_master(self, segment: str, entry: Entry, values: Tensor, start: int = 0) -> None:
        """Stores fp32 `values` (1-D, RAM) as elements from `start` on of one tensor's master."""
        where = _within(entry, start, start + values.numel())
        if self.precision == "fp32":
            self.flat(segment, "w")[where].copy_(values)
            return
        hi, lo = split_master(values)
        self.flat(segment, "w")[where].copy_(hi)
        if entry.tensor.trainable:
            self.flat(segment, "lo")[where].copy_(lo)

    def num_bytes(self) -> Mapping[Tier, Mapping[str, int]]:
        """Bytes of buffers by tier, then kind."""
        totals: dict[Tier, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for (segment, kind), tier in self._tiers.items():
            flat = self.flat(segment, kind)
            totals[tier][kind] += flat.numel() * flat.itemsize
        return {tier: dict(kinds) for tier, kinds in totals.items()}

    def close(self) -> None:
        """Unpins and lets go of every buffer; no copy may be in flight. Views handed out stay valid, but unpinned."""
        if self.pinned is not None:
            unregister(self.pinned)
            self.pinned = None
        self._flats.clear()
        self._tiers.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


def _kinds(layout: Layout, plan: SegmentPlan, precision: Precision) -> Iterator[tuple[str, str, int, Tier]]:
    """(segment, kind, elements, tier) of each buffer the segment needs."""
    if plan.state == "disk":
        raise PlanError(f"{plan.name}: state on disk is not supported yet; plan it in ram or hbm")
    yield layout.segment, "w", layout.num_elements, plan.state
    if not layout.num_trainable:
        return
    kinds = ("lo", "m", "v") if precision == "bf16" else ("m", "v")
    for kind in kinds if plan.updates_on_device else (*kinds, "grad"):
        yield layout.segment, kind, layout.num_trainable, plan.state


def _within(entry: Entry, start: int, stop: int | None) -> slice:
    stop = entry.tensor.num_elements if stop is None else stop
    if not 0 <= start <= stop <= entry.tensor.num_elements:
        raise ValueError(f"{entry.tensor.name}: elements [{start}, {stop}) of {entry.tensor.num_elements}")
    return slice(entry.offset + start, entry.offset + stop)

"""SegmentStore: the home buffers of every segment. It knows where bytes lie, never when they move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from megatrain.memory import HostArena, Pinned, padded, pin, unregister
from megatrain.models.layout import Entry, Layout
from megatrain.planner.landing import landing_bytes
from megatrain.schedule.plan import Plan, SegmentPlan, Tier
from megatrain.store.disk import DiskHomes, Home
from megatrain.store.master import join_master, split_master

Precision = Literal["bf16", "fp32"]

_DTYPES = {"lo": torch.int16}  # of kinds that are not fp32; w is what the precision says
_TRAVELS = ("w", "grad")  # what DMA reads and writes; state seldom: what the CPU alone touches needs no pinning


class SegmentStore:
    """Every segment's flat buffers, zeroed. Kinds: w; if trainable `state_kinds`, and grad if it comes to RAM.

    `state_kinds`: lo (bf16 only), m, v, and what the layouts list besides. A segment whose plan says state "hbm" lives
    on `device` alone; all others in RAM, what travels (w, grad; state if the plan says update "device") pinned when
    `device` is a CUDA device (a refusal is warned of), or, where the plan says so, on disk: in a nameless file in
    `disk_folder`, reached through landing slots in RAM (`disk`). The gradient of a segment in HBM stays in its slot; in
    two passes none has a home, and those on their way to the host's updates share landing slots (`landed_grad`).
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        precision: Precision,
        plan: Plan,
        device: torch.device,
        disk_folder: Path | None = None,
    ) -> None:
        plans = {segment.name: segment for segment in plan.segments}
        if [layout.segment for layout in layouts] != list(plans):
            raise ValueError(f"layouts of {[x.segment for x in layouts]} for a plan of {list(plans)}")
        self.layouts: Mapping[str, Layout] = MappingProxyType({layout.segment: layout for layout in layouts})
        self.precision: Precision = precision
        self.device = device
        self.state_kinds = tuple(layouts[0].state_bytes(self.dtype("w").itemsize))
        self._pinned: list[Pinned] = []
        self.disk: DiskHomes | None = None
        self._landing_grads = 0  # slots
        self._arenas: list[HostArena] = []
        self._flats: dict[tuple[str, str], Tensor] = {}
        self._landed: dict[tuple[str, str], Tensor] = {}  # what of the segment at hand lies in landing slots
        self._visited: tuple[str, ...] = ()  # segment and kinds that landing slot 0 holds as they are on disk
        self._homes: dict[tuple[str, str], tuple[int, Tier]] = {}  # -> elements and where they live
        in_two_passes = plan.clip_mode == "two-pass"
        table = [item for layout in layouts for item in _kinds(layout, plans[layout.segment], self.state_kinds)]
        if in_two_passes:
            table = [row for row in table if row[1] != "grad"]
        travels, stays, on_disk = [], [], []
        for segment, kind, count, tier in table:
            self._homes[segment, kind] = count, tier
            if tier == "hbm":
                self._flats[segment, kind] = torch.zeros(count, dtype=self.dtype(kind), device=device)
            elif tier == "disk":
                on_disk.append(Home(segment, kind, count, self.dtype(kind)))
            else:
                rows = travels if kind in _TRAVELS or plans[segment].streams_state else stays
                rows.append((segment, kind, count))
        if in_two_passes:
            on_host = [self.layouts[s.name].num_trainable for s in plan.segments if s.state != "hbm"]
            self._landing_grads = plan.grad_landing_slots if on_host else 0
            travels += [(f"land.grad.{slot}", "grad", max(on_host)) for slot in range(self._landing_grads)]
        if on_disk:
            if disk_folder is None:
                raise ValueError(f"{on_disk[0].segment} lives on disk: give the store a disk_folder")
            slot_bytes = landing_bytes(plan, self.layouts, self.dtype("w").itemsize)
            self.disk = DiskHomes(disk_folder, on_disk, slot_bytes, plan.disk_slots)
        self._place(travels)
        self._place(stays)
        if device.type == "cuda":
            landing = self.disk.slots_of("w") if self.disk else []
            often = [*(self._flats[segment, kind] for segment, kind, _ in travels if kind in _TRAVELS), *landing]
            states = [self._flats[segment, kind] for segment, kind, _ in travels if kind not in _TRAVELS]
            # One refusal leaves nothing pinned, so what travels most does not hang on the states that pass once a step.
            self._pinned = [pin(buffers) for buffers in (often, states) if buffers]

    def _place(self, rows: list[tuple[str, str, int]]) -> None:
        """Gives each (segment, kind, count) its page-aligned part of one new arena."""
        offsets_bytes, total_bytes = [], 0
        for _, kind, count in rows:
            offsets_bytes.append(total_bytes)
            total_bytes += padded(count * self.dtype(kind).itemsize)
        if not total_bytes:
            return
        arena = HostArena(total_bytes)
        self._arenas.append(arena)
        for (segment, kind, count), offset_bytes in zip(rows, offsets_bytes, strict=True):
            self._flats[segment, kind] = arena.view(offset_bytes, count, self.dtype(kind))

    def dtype(self, kind: str) -> torch.dtype:
        """The element type of a kind at this store's precision."""
        if kind == "w":
            return torch.bfloat16 if self.precision == "bf16" else torch.float32
        return _DTYPES.get(kind, torch.float32)

    def kinds(self, segment: str) -> tuple[str, ...]:
        """The kinds this segment has a buffer of."""
        return tuple(kind for name, kind in self._homes if name == segment)

    def on_disk(self, segment: str) -> tuple[str, ...]:
        """The kinds of a segment that live on disk."""
        return tuple(kind for kind in self.kinds(segment) if self._homes[segment, kind][1] == "disk")

    def flat(self, segment: str, kind: str) -> Tensor:
        """The home buffer itself, 1-D: num_elements of w, num_trainable of the others. KeyError if there is none, or if
        it is on disk and not landed (`visit`, `at`)."""
        found = self._flats.get((segment, kind), self._landed.get((segment, kind)))
        if found is None:
            raise KeyError(f"{segment}.{kind} is not in memory")
        return found

    @contextmanager
    def visit(self, segment: str, *kinds: str, write: bool = False) -> Iterator[None]:
        """Inside, `flat` has every buffer of `kinds` (of all, if none are given) of a segment, wherever it lives.

        What lives on disk and has not landed comes to landing slot 0, and goes back if `write`. One visit at a time,
        while no program runs and no update is pending (after a step in two passes a landing slot may hold what the disk
        has yet to get: `Plan.spilled_late`); the same visit again reads nothing.
        """
        wanted = [kind for kind in self.on_disk(segment) if kind in kinds or not kinds]
        slots = {kind: 0 for kind in wanted if (segment, kind) not in self._landed}
        if not slots:
            yield
            return
        assert self.disk is not None
        this = (segment, *slots)
        if self._visited != this:
            self.load(segment, slots)
        self._visited = ()
        with self.at(segment, slots):
            yield
        if write:
            self.spill(segment, slots)
        self._visited = this

    @contextmanager
    def at(self, segment: str, slots: Mapping[str, int]) -> Iterator[None]:
        """Inside, `flat` has the buffers of a segment that lie in landing slots: kind -> slot."""
        assert not self._landed, "one segment at a time"
        if self.disk is not None:
            self._landed = {(segment, kind): self.disk.landing(segment, kind, slot) for kind, slot in slots.items()}
        try:
            yield
        finally:
            self._landed = {}

    def load(self, segment: str, slots: Mapping[str, int]) -> None:
        """Homes on disk to landing slots: kind -> slot."""
        assert self.disk is not None
        self._visited = ()
        self.disk.load(segment, slots)

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
        """Stores fp32 `values` (1-D, RAM) as elements from `start` on of one tensor's master, where its average, if one
        is kept, starts anew."""
        where = _within(entry, start, start + values.numel())
        if entry.tensor.trainable and "ema" in self.state_kinds:
            self.flat(segment, "ema")[where].copy_(values)
        if self.precision == "fp32":
            self.flat(segment, "w")[where].copy_(values)
            return
        hi, lo = split_master(values)
        self.flat(segment, "w")[where].copy_(hi)
        if entry.tensor.trainable:
            self.flat(segment, "lo")[where].copy_(lo)

    def spill(self, segment: str, slots: Mapping[str, int]) -> None:
        """Landing slots to homes on disk: kind -> slot."""
        assert self.disk is not None
        self.disk.spill(segment, slots)

    def landing(self, segment: str, kind: str, slot: int) -> Tensor:
        """A landing slot, cut to `kind` of `segment`."""
        assert self.disk is not None
        return self.disk.landing(segment, kind, slot)

    def landed_grad(self, segment: str, slot: int) -> Tensor:
        """The gradient of `segment` in a landing slot."""
        return self._flats[f"land.grad.{slot}", "grad"][: self.layouts[segment].num_trainable]

    def poison_landing(self, kind: str, slot: int) -> None:
        """For tests: fills a landing slot with NaN."""
        if kind == "grad":
            self._flats[f"land.grad.{slot}", "grad"].fill_(float("nan"))
            return
        assert self.disk is not None
        self.disk.slots_of(kind)[slot].fill_(0xFF)

    def num_bytes(self) -> Mapping[Tier, Mapping[str, int]]:
        """Bytes of buffers by tier, then kind; landing slots are kind "landing"."""
        totals: dict[Tier, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for (_, kind), (count, tier) in self._homes.items():
            totals[tier][kind] += count * self.dtype(kind).itemsize
        landing_bytes = sum(self._flats[f"land.grad.{slot}", "grad"].nbytes for slot in range(self._landing_grads))
        if self.disk is not None:
            landing_bytes += self.disk.landing_bytes
        if landing_bytes:
            totals["ram"]["landing"] = landing_bytes
        return {tier: dict(kinds) for tier, kinds in totals.items()}

    def close(self) -> None:
        """Unpins and lets go of every buffer; no copy may be in flight. Views handed out stay valid, but unpinned."""
        for pinned in self._pinned:
            unregister(pinned)
        self._pinned.clear()
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        self._flats.clear()
        self._homes.clear()
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


def _kinds(layout: Layout, plan: SegmentPlan, state_kinds: Sequence[str]) -> Iterator[tuple[str, str, int, Tier]]:
    """(segment, kind, elements, tier) of each buffer the segment needs."""
    in_hbm = plan.state == "hbm"
    yield layout.segment, "w", layout.num_elements, "hbm" if in_hbm else plan.weights_home
    if not layout.num_trainable:
        return
    for kind in state_kinds:
        yield layout.segment, kind, layout.num_trainable, plan.state
    if not in_hbm:
        yield layout.segment, "grad", layout.num_trainable, "ram"


def _within(entry: Entry, start: int, stop: int | None) -> slice:
    stop = entry.tensor.num_elements if stop is None else stop
    if not 0 <= start <= stop <= entry.tensor.num_elements:
        raise ValueError(f"{entry.tensor.name}: elements [{start}, {stop}) of {entry.tensor.num_elements}")
    return slice(entry.offset + start, entry.offset + stop)

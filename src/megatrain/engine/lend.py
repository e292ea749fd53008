"""Lender: the weights of a model, lent block by block in the order of a forward pass, again and again.

Blocks whose home is the device are lent where they lie. The others travel, from RAM or from disk: while block i
computes, the next one of them arrives in the other of two slots. What is lent holds the same bits either way.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from megatrain.memory import copy_in_pieces
from megatrain.models.template import Weights
from megatrain.schedule.plan import Plan
from megatrain.store.store import SegmentStore

NUM_SLOTS = 2
LINK_TRIALS = 3


class Lender:
    """Lends from `store`, which nobody may change meanwhile. One thread and one compute stream call it.

    `through_slots`: homes in RAM are not where `device` computes (a GPU). False: blocks in RAM are lent from there.
    """

    def __init__(self, store: SegmentStore, plan: Plan, device: torch.device, *, through_slots: bool) -> None:
        self._store = store
        self._device = device
        self._names = [block.name for block in plan.blocks]
        away = [block for block in plan.blocks if block.state != "hbm"]
        travelling = [block.name for block in away if through_slots or block.weights_on_disk]
        self._next = dict(zip(travelling, [*travelling[1:], *travelling[:1]], strict=True))
        self._resident = {
            name: store.views(store.flat(name, "w"), name) for name in self._names if name not in self._next
        }
        size = max((store.layouts[name].num_elements for name in travelling), default=0)
        self._slots = [torch.empty(size, dtype=store.dtype("w"), device=device) for _ in range(NUM_SLOTS)]
        self._holds: list[str | None] = [None] * NUM_SLOTS
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arrived: list[torch.cuda.Event | None] = [None] * NUM_SLOTS

    @property
    def streamed_bytes(self) -> int:
        """Bytes that travel for one forward pass; 0 when every block is resident."""
        if len(self._next) <= NUM_SLOTS:
            return 0  # each has a slot to itself
        return sum(self._num_bytes(name) for name in self._next)

    def outer(self) -> dict[str, Tensor]:
        """EMBED's and HEAD's tensors on the device, by checkpoint name. Copied there once, if their home is RAM."""
        tensors = {}
        for segment in ("EMBED", "HEAD"):
            with self._store.visit(segment, "w"):
                flat = self._store.flat(segment, "w").to(self._device, copy="w" in self._store.on_disk(segment))
            views = self._store.views(flat, segment)
            tensors |= {e.tensor.name: views[e.tensor.local] for e in self._store.layouts[segment].entries}
        return tensors

    def block(self, index: int) -> Weights:
        """The weights of block `index` on the device, for what is queued before the next call."""
        name = self._names[index]
        if name not in self._next:
            return self._resident[name]
        if name not in self._holds:
            self._fetch(name, 0)
        slot = self._holds.index(name)
        arrived = self._arrived[slot]
        if arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(arrived)
        following = self._next[name]
        if following not in self._holds:
            self._fetch(following, 1 - slot)
        return self._store.views(self._slots[slot], name)

    def link_Bps(self) -> float | None:
        """Measured bytes a second of the link, with the largest travelling block. None where there is no link."""
        if self._stream is None or not self._next:
            return None
        name = max(self._next, key=self._num_bytes)
        rates = []
        for _ in range(LINK_TRIALS):
            torch.cuda.synchronize(self._device)
            started = time.perf_counter()
            self._fetch(name, 0)
            torch.cuda.synchronize(self._device)
            rates.append(self._num_bytes(name) / (time.perf_counter() - started))
        return max(rates)

    def _num_bytes(self, name: str) -> int:
        return self._store.layouts[name].num_elements * self._store.dtype("w").itemsize

    def _fetch(self, name: str, slot: int) -> None:
        with self._store.visit(name, "w"):
            self._copy(self._store.flat(name, "w"), slot)
            if self._stream is not None and "w" in self._store.on_disk(name):
                self._stream.synchronize()  # the next visit lands in the same place
        self._holds[slot] = name

    def _copy(self, home: Tensor, slot: int) -> None:
        if self._stream is None:
            self._slots[slot][: home.numel()].copy_(home)
            return
        # the slot's last reader was queued on the compute stream before this call
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy_in_pieces(self._slots[slot][: home.numel()], home)
        arrived = torch.cuda.Event()
        arrived.record(self._stream)
        self._arrived[slot] = arrived

"""Passes: the least seconds of each pass of a step, from sums alone. No torch.

A pass is no shorter than its arithmetic, or than link and disk need for what must travel during it, which is all but
what slots hold when it begins or ends; nor is any stretch of blocks that are placed alike: where some of the blocks
need the disk, it rests during the others.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatrain.hardware.rates import Rates
from megatrain.planner.parts import Part
from megatrain.schedule.ops import Kind
from megatrain.schedule.plan import Plan

_TRAVELS = (Kind.FETCH, Kind.FETCH_GRAD, Kind.FETCH_STATE, Kind.STORE, Kind.STORE_STATE, Kind.DRAIN, Kind.OFFLOAD,
            Kind.RELOAD)  # fmt: skip


class Passes(NamedTuple):
    """Least seconds of the passes of a step, and of what link and disk do in it."""

    first_s: float  # forward of the first round
    later_s: float  # forward of the others
    backward_s: float
    again_s: float
    link_s: float
    disk_s: float


class Link(NamedTuple):
    """Bytes a second each way, and both ways together."""

    h2d_Bps: float
    d2h_Bps: float
    both_Bps: float

    @classmethod
    def of(cls, rates: Rates) -> Link:
        """As fast as the quickest of what travels."""
        quicker = min(1.0, *(rates.scale.get(kind, 1.0) for kind in _TRAVELS))
        return cls(rates.h2d_Bps / quicker, rates.d2h_Bps / quicker, rates.link_both_Bps)

    def seconds(self, h2d_bytes: np.ndarray | float, d2h_bytes: np.ndarray | float) -> np.ndarray:
        """The least for so much each way."""
        both_s = (h2d_bytes + d2h_bytes) / self.both_Bps
        return np.maximum(np.maximum(h2d_bytes / self.h2d_Bps, d2h_bytes / self.d2h_Bps), both_s)


class Travel:
    """What the blocks of a plan move in a step of so many rounds. `parts`: of all segments."""

    def __init__(self, plan: Plan, parts: Part[np.ndarray], num_rounds: int, link: Link) -> None:
        self._plan, self._parts, self._num_rounds, self._link = plan, parts, num_rounds, link
        self._blocks = blocks = Part(*(column[1:-1] for column in parts))
        self._two_pass = plan.clip_mode == "two-pass"
        self._visited = np.arange(len(blocks.way)) >= plan.lowest_trainable - 1  # by the backward pass
        self._starts = np.flatnonzero(np.diff(blocks.way, prepend=-1.0))  # of stretches
        waiting = list(plan.waiting_in_ram)
        self._inputs = np.zeros_like(blocks.input_bytes)
        self._inputs[waiting] = blocks.input_bytes[waiting]
        self._reads_s = np.where(blocks.fetched_bytes > 0, blocks.weights_s, 0.0)
        self._land = plan.weight_slots + plan.disk_slots

    def passes(self) -> Passes:
        """Of all rounds together."""
        plan, parts, num_rounds, link = self._plan, self._parts, self._num_rounds, self._link
        fetched, inputs = self._blocks.fetched_bytes, self._inputs.sum()
        # A step begins with empty slots, and ends with all gradients at home.
        fetch, first_fetch = _beyond(plan.weight_slots, fetched), fetched.sum() + parts.own_bytes.sum()
        refetch = num_rounds * _beyond(plan.weight_slots, fetched * self._visited)
        stays = _beyond(plan.act_slots, self._inputs[self._inputs > 0]) if self._two_pass else inputs
        drained, sums = parts.drained_bytes.sum(), self._again * _beyond(plan.grad_slots, self._blocks.shared_bytes)
        read_s, reread_s = _beyond(self._land, self._reads_s), _beyond(self._land, self._reads_s * self._visited)
        back_link_s = link.seconds(refetch + stays + sums, 0.0 if self._two_pass else sums + drained)
        # HEAD's gradient may be cleared while its weights are still on their way.
        cleared_s, sums_s = parts.sums_s[-1], parts.sums_s[:-1].sum()
        back_s = max(parts.backward_s.sum() + sums_s, back_link_s, num_rounds * reread_s)
        # Only slots of states come before the second pass, and go after it.
        states_s = _beyond(plan.disk_slots, parts.state_s) + _beyond(plan.disk_slots, parts.spill_s)
        again_s = max(parts.again_s.sum() + parts.device_s.sum(), reread_s + states_s)
        shared = self._again * self._blocks.shared_bytes.sum()
        once_more = refetch + stays if self._two_pass else 0.0
        first_fetch += parts.passing_in_bytes.sum()
        passed = parts.passing_out_bytes  # but for what slots hold, before the pass turns
        h2d = first_fetch + (num_rounds - 1) * fetch + refetch + inputs + shared + once_more
        read_both_s = num_rounds * (read_s + reread_s)
        first_link_s = link.seconds(first_fetch, stays / num_rounds + _beyond(plan.state_slots, passed))
        other_link_s = link.seconds(fetch, stays / num_rounds)
        return Passes(
            first_s=float(max(first_link_s, read_s, self._forward_s(updates=not self._two_pass) + cleared_s)),
            later_s=float((num_rounds - 1) * max(other_link_s, read_s, self._forward_s(updates=False))),
            backward_s=float(max(back_s, self._backward_s())),
            again_s=float(max(again_s, link.seconds(refetch, drained))) if self._two_pass else 0.0,
            link_s=float(h2d / link.h2d_Bps + (inputs + shared + drained + passed.sum()) / link.d2h_Bps),
            disk_s=float(parts.state_s.sum() + parts.spill_s.sum() + read_both_s),
        )

    @cached_property
    def _again(self) -> int:
        """How often sums come back: of more than slots, all go home in every round, and back in all but the first."""
        is_shared = np.count_nonzero(self._blocks.shared_bytes)
        return self._num_rounds - 1 if is_shared > self._plan.grad_slots else 0

    def _forward_s(self, updates: bool) -> float:
        """Of one round, stretch by stretch. `updates`: those on the device, of the step before, are yet to be done."""
        each_s = self._parts.forward_s / self._num_rounds + (self._parts.device_s if updates else 0.0)
        # The first input of a stretch may have left before it.
        leaves = self._beyond_each(self._plan.act_slots + 1, self._inputs / self._num_rounds)
        fetched = self._beyond_each(self._plan.weight_slots, self._blocks.fetched_bytes)
        device_s, reads_s = self._of_each(each_s[1:-1]), self._beyond_each(self._land, self._reads_s)
        stretches_s = (device_s, self._link.seconds(fetched, leaves), reads_s)
        return float(each_s[0] + each_s[-1] + np.max(stretches_s, axis=0).sum())

    def _backward_s(self) -> float:
        """Of all rounds, stretch by stretch. Unless the step has two passes, sums of gradients go home, and in each
        round but the first come back."""
        plan, backward_s, link = self._plan, self._parts.backward_s, self._link
        device_s = self._of_each(backward_s[1:-1]) / self._num_rounds
        least_s = np.maximum(device_s, self._beyond_each(self._land, self._reads_s * self._visited))
        comes = self._beyond_each(plan.weight_slots, self._blocks.fetched_bytes * self._visited)
        comes += self._beyond_each(plan.act_slots, self._inputs / self._num_rounds)
        shared = np.zeros_like(self._inputs) if self._two_pass else self._blocks.shared_bytes
        sums = self._beyond_each(plan.grad_slots, shared)
        first_s = np.maximum(least_s, link.seconds(comes, sums)).sum()
        # Of a gradient slot a block that is trained has the turn until its sum came, was added to and went home.
        adds_s = self._of_each(np.where(shared > 0, backward_s[1:-1], 0.0)) / self._num_rounds
        turns_s = (adds_s + sums / link.h2d_Bps + sums / link.d2h_Bps) / max(1, plan.grad_slots)
        later_s = np.max((least_s, link.seconds(comes + sums, sums), turns_s), axis=0).sum()
        return float(backward_s[0] + backward_s[-1] + first_s + (self._num_rounds - 1) * later_s)

    def _of_each(self, column: np.ndarray) -> np.ndarray:
        """The sum of each stretch."""
        return np.add.reduceat(column, self._starts)

    def _beyond_each(self, slots: int, column: np.ndarray) -> np.ndarray:
        """The sum of each stretch but for what slots hold."""
        return np.maximum(0.0, self._of_each(column) - slots * np.maximum.reduceat(column, self._starts))


def _beyond(slots: int, column: np.ndarray) -> float:
    """The sum of `column` but for the largest, of which there is one in each slot."""
    return float(np.sort(column)[: max(0, len(column) - slots)].sum())

"""Floor: a time that no simulation of a plan can beat, from sums alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatrain.planner.account import Question
from megatrain.planner.parts import Part, Parts
from megatrain.planner.passes import Link, Passes, Travel
from megatrain.schedule.build import rounds
from megatrain.schedule.plan import Plan

BESIDE_SHARE = 0.03  # of what other lanes do beside the device: hidden in simulated time, never quite in real time


class Floor:
    """A lower bound of a plan's step. Its passes follow each other: none is shorter than its arithmetic, or than link
    and disk need for what must travel during it, which is all but what slots hold when it begins or ends. And an update
    on the host waits for the one before, and for its state from the disk, as landing slots let it in."""

    def __init__(self, question: Question) -> None:
        self._work = work = question.work
        self._link = Link.of(work.rates)
        self._parts = Parts(work)

    def __call__(self, plan: Plan) -> float:
        return self._of(plan, *self._parts.of(plan))

    def least(self, kept: Plan, attending: Plan) -> float:
        """Of every plan whose blocks are placed as in one of the two or heavier. A second pass finds nothing of what
        was kept whole, but what attention gave."""
        (parts, columns), (others, _) = self._parts.of(kept), self._parts.of(attending)
        if kept.clip_mode == "two-pass":
            parts = [
                part._replace(again_s=min(part.again_s, other.again_s))
                for part, other in zip(parts, others, strict=True)
            ]
            columns = columns._replace(again_s=np.array([part.again_s for part in parts]))
        return self._of(kept, parts, columns)

    def _of(self, plan: Plan, parts: Sequence[Part[float]], columns: Part[np.ndarray]) -> float:
        num_rounds = len(rounds(self._work.num_micro_batches, plan.round_micro_batches))
        passes = Travel(plan, columns, num_rounds, self._link).passes()
        if plan.clip_mode == "two-pass":
            step_s = self._two_passes_s(plan, parts, passes)
        else:
            step_s = self._deferred_s(plan, parts, columns, passes, num_rounds)
        beside_s = passes.link_s + passes.disk_s + float(columns.host_s.sum())
        return float(max(step_s, passes.disk_s) + self._work.rates.step_s + BESIDE_SHARE * beside_s)

    def _deferred_s(
        self, plan: Plan, parts: Sequence[Part[float]], columns: Part[np.ndarray], passes: Passes, num_rounds: int
    ) -> float:
        """After the update of a segment, its forward and what follows is still to come."""
        fetch_s = (columns.fetched_bytes + columns.own_bytes) / self._link.h2d_Bps
        forward_s = columns.forward_s[::-1].cumsum()[::-1] / num_rounds  # of a segment and all behind it
        fetches_s = fetch_s[::-1].cumsum()[::-1]
        updated_s = self._updated_s(plan, parts) if plan.disk_slots else columns.host_s.cumsum()
        ends_s = (updated_s + np.maximum(fetch_s + forward_s, fetches_s))[columns.host_s > 0]
        return passes.backward_s + passes.later_s + max(passes.first_s, ends_s.max(initial=0.0))

    def _updated_s(self, plan: Plan, parts: Sequence[Part[float]]) -> np.ndarray:
        """When each update on the host ends, one behind the other, each with its state from the disk."""
        landing, now_s, ends_s = _Landing(plan.disk_slots), 0.0, []
        for part in parts:
            landed_s = landing.brings(part.state_s + part.weights_s) if part.state_s else 0.0
            now_s = max(now_s, landed_s) + part.host_s
            if part.state_s:
                landing.updated(now_s, part.spill_s)
            ends_s.append(now_s)
        return np.array(ends_s)

    def _two_passes_s(self, plan: Plan, parts: Sequence[Part[float]], passes: Passes) -> float:
        """In the second backward a gradient leaves its slot for a landing slot, which the update before it frees."""
        now_s = passes.first_s + passes.backward_s
        least_s = now_s + passes.again_s
        landing = _Landing(plan.disk_slots)
        drained_s: list[float] = []
        updates_s: list[float] = [0.0] * plan.grad_landing_slots
        rotates = sum(s.trainable and s.grads == "pool" for s in plan.blocks) > plan.grad_slots
        for segment, part in zip(reversed(plan.segments), reversed(parts), strict=True):
            turns = rotates and segment.grads == "pool" and part.host_s
            if turns and len(drained_s) >= plan.grad_slots:
                now_s = max(now_s, drained_s[-plan.grad_slots])
            now_s += part.again_s + part.device_s
            if not part.host_s:
                continue
            leaves_s = max(now_s, updates_s[-plan.grad_landing_slots]) + part.drained_bytes / self._link.d2h_Bps
            landed_s = landing.brings_early(part.state_s) if part.state_s else 0.0
            updates_s.append(max(updates_s[-1], leaves_s, landed_s) + part.host_s)
            if turns:
                drained_s.append(leaves_s)
            if part.state_s:
                landing.updated(updates_s[-1], part.spill_s)
        return max(least_s, now_s, updates_s[-1] if updates_s else 0.0)


class _Landing:
    """The earliest that states from the disk can be in RAM, each in the slot of one that was updated and has left."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._busy_s = 0.0  # the disk reads and writes in turn
        self._gone: list[tuple[float, float]] = []  # (end of an update, seconds of its way to the disk)

    def brings(self, load_s: float) -> float:
        """When the next one is there, if none was before the step."""
        self._busy_s += load_s
        if len(self._gone) < self._slots:
            return self._busy_s
        updated_s, spill_s = self._gone[-self._slots]
        self._busy_s += spill_s
        return max(self._busy_s, updated_s + spill_s + load_s)

    def brings_early(self, load_s: float) -> float:
        """When the next one is there, if slots were filled long before the first update."""
        if len(self._gone) < self._slots:
            return 0.0
        self._busy_s = max(self._busy_s, self._gone[0][0])
        return self.brings(load_s)

    def updated(self, updated_s: float, spill_s: float) -> None:
        """A state may leave its slot."""
        self._gone.append((updated_s, spill_s))

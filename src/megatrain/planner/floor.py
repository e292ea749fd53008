"""Floor: a time that no simulation of a plan can beat, from sums alone. No torch.

It is of the plan as the search simulates it, blocks taken together: a slot holds as much here as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from megatrain.planner import sizes
from megatrain.planner.account import Question
from megatrain.planner.prediction import GROUPS, edges
from megatrain.schedule.build import rounds
from megatrain.schedule.ops import Kind, Lane, Op, Place
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.schedule.slots import kept_places

BESIDE_SHARE = 0.03  # of what other lanes do beside the device: hidden in simulated time, never quite in real time
_TRAVELS = (Kind.FETCH, Kind.FETCH_GRAD, Kind.DRAIN, Kind.OFFLOAD, Kind.RELOAD)


class _Part(NamedTuple):
    """What a segment, or a group of them, brings to a step; 0 of what it has not. Passes: of all micro-batches."""

    forward_s: float
    backward_s: float
    again_s: float  # a second backward, which finds nothing kept
    sums_s: float  # its gradient cleared, and its norm
    device_s: float  # its update there
    host_s: float  # its update there
    fetched_bytes: int  # its weights, to a shared slot
    own_bytes: int  # its weights, to a slot of their own, once
    drained_bytes: int  # its gradient, to an update on the host
    input_bytes: int
    weights_s: float  # to read them from the disk
    state_s: float
    spill_s: float


class _Passes(NamedTuple):
    """Least seconds of the passes of a step, and of what link and disk do in it."""

    first_s: float  # forward of the first round
    later_s: float  # forward of the others
    backward_s: float
    again_s: float
    link_s: float
    disk_s: float


class Floor:
    """A lower bound of a plan's step. Its passes follow each other: none is shorter than its arithmetic, or than link
    and disk need for what must travel during it, which is all but what slots hold when it begins or ends. And an update
    on the host waits for the one before, and for its state from the disk, as landing slots let it in."""

    def __init__(self, question: Question) -> None:
        work = question.work
        self._work, rates = work, work.rates
        quicker = min(1.0, *(rates.scale.get(kind, 1.0) for kind in _TRAVELS))
        self._h2d_Bps, self._d2h_Bps = rates.h2d_Bps / quicker, rates.d2h_Bps / quicker
        # By identity, which is quick; what was seen is held, so that nothing else takes its id.
        self._known: dict[int, tuple[SegmentPlan, _Part]] = {}

    def __call__(self, plan: Plan) -> float:
        groups, lowest = list(pairwise(edges(plan, GROUPS))), plan.lowest_trainable
        each = [self._part(segment, index >= lowest) for index, segment in enumerate(plan.segments)]
        parts = [_sum(each[start:stop]) for start, stop in groups]
        folded = replace(plan, segments=tuple(plan.segments[start] for start, _ in groups))
        num_rounds = len(rounds(self._work.num_micro_batches, plan.round_micro_batches))
        passes = self._passes(folded, parts, num_rounds)
        if plan.clip_mode == "two-pass":
            step_s = self._two_passes_s(folded, parts, passes)
        else:
            step_s = self._deferred_s(folded, parts, passes, num_rounds)
        beside_s = passes.link_s + passes.disk_s + sum(part.host_s for part in parts)
        return max(step_s, passes.disk_s) + self._work.rates.step_s + BESIDE_SHARE * beside_s

    def _passes(self, plan: Plan, parts: Sequence[_Part], num_rounds: int) -> _Passes:
        """Of all rounds together."""
        two_pass, blocks = plan.clip_mode == "two-pass", parts[1:-1]
        visited = blocks[max(1, plan.lowest_trainable) - 1 :]  # by the backward pass
        fetched = [part.fetched_bytes for part in blocks]
        # A step begins with empty slots, and ends with all gradients at home.
        fetch, first_fetch = _beyond(plan.weight_slots, fetched), sum(fetched) + sum(part.own_bytes for part in parts)
        refetch = num_rounds * _beyond(plan.weight_slots, [part.fetched_bytes for part in visited])
        waiting = [blocks[block].input_bytes for block in plan.waiting_in_ram]
        inputs = _beyond(plan.act_slots if two_pass else 0, waiting)
        # Of more shared sums than slots, all go home in every round and come back in every one but the first.
        shared = [blocks[i].drained_bytes for i, s in enumerate(plan.blocks) if s.trainable and s.grads == "pool"]
        sums, again = _beyond(plan.grad_slots, shared), num_rounds - 1 if len(shared) > plan.grad_slots else 0
        drained = sum(part.drained_bytes for part in parts)
        slots = plan.weight_slots + plan.disk_slots
        read_s, reread_s = (
            _beyond(slots, [part.weights_s for part in those if part.fetched_bytes]) for those in (blocks, visited)
        )
        forward_s, backward_s, again_s, sums_s, device_s, *_ = map(sum, zip(*parts, strict=True))
        round_s, updates_s, num_later = forward_s / num_rounds, 0.0 if two_pass else device_s, num_rounds - 1
        home = 0 if two_pass else again * sums + drained
        back_s = max(backward_s + sums_s, self._link_s(refetch + inputs + again * sums, home), num_rounds * reread_s)
        h2d = first_fetch + num_later * fetch + refetch + sum(waiting) + again * sum(shared)
        d2h = sum(waiting) + again * sum(shared) + drained
        along = _Along(plan, parts, num_rounds, self._link_s)
        first_s = max(round_s + updates_s, self._link_s(first_fetch, inputs / num_rounds), read_s)
        other_s = max(round_s, self._link_s(fetch, inputs / num_rounds), read_s)
        return _Passes(
            first_s=max(first_s, along.forward_s(updates=not two_pass)),
            later_s=num_later * max(other_s, along.forward_s(updates=False)),
            backward_s=max(back_s, along.backward_s(drains=not two_pass)),
            again_s=max(again_s + device_s, self._link_s(refetch, drained), reread_s) if two_pass else 0.0,
            link_s=h2d / self._h2d_Bps + d2h / self._d2h_Bps,
            disk_s=sum(part.state_s + part.spill_s for part in parts) + num_rounds * (read_s + reread_s),
        )

    def _link_s(self, h2d_bytes: float, d2h_bytes: float) -> float:
        both_s = (h2d_bytes + d2h_bytes) / self._work.rates.link_both_Bps
        return max(h2d_bytes / self._h2d_Bps, d2h_bytes / self._d2h_Bps, both_s)

    def _deferred_s(self, plan: Plan, parts: Sequence[_Part], passes: _Passes, num_rounds: int) -> float:
        """After the update of a segment, its forward and what follows is still to come."""
        later_s = passes.backward_s + passes.later_s
        forward_s = sum(part.forward_s for part in parts) / num_rounds
        fetches_s = sum(part.fetched_bytes + part.own_bytes for part in parts) / self._h2d_Bps
        landing = _Landing(plan.disk_slots)
        updated_s, least_s = 0.0, passes.first_s + later_s
        for part in parts:
            fetch_s = (part.fetched_bytes + part.own_bytes) / self._h2d_Bps
            if part.host_s:
                landed_s = landing.brings(part.state_s + part.weights_s) if part.state_s else 0.0
                updated_s = max(updated_s, landed_s) + part.host_s
                if part.state_s:
                    landing.updated(updated_s, part.spill_s)
                least_s = max(least_s, updated_s + max(fetch_s + forward_s, fetches_s) + later_s)
            forward_s -= part.forward_s / num_rounds
            fetches_s -= fetch_s
        return least_s

    def _two_passes_s(self, plan: Plan, parts: Sequence[_Part], passes: _Passes) -> float:
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
            leaves_s = max(now_s, updates_s[-plan.grad_landing_slots]) + part.drained_bytes / self._d2h_Bps
            landed_s = landing.brings_early(part.state_s) if part.state_s else 0.0
            updates_s.append(max(updates_s[-1], leaves_s, landed_s) + part.host_s)
            if turns:
                drained_s.append(leaves_s)
            if part.state_s:
                landing.updated(updates_s[-1], part.spill_s)
        return max(least_s, now_s, updates_s[-1] if updates_s else 0.0)

    def _part(self, segment: SegmentPlan, comes_back: bool) -> _Part:
        """`_counted`, looked up."""
        known = self._known.get(id(segment))
        if known is None:
            known = self._known[id(segment)] = segment, self._counted(segment, comes_back)
        return known[1]

    def _counted(self, segment: SegmentPlan, comes_back: bool) -> _Part:
        """`comes_back`: the backward pass reaches it; below the lowest trainable segment nothing is kept."""
        shapes, name = self._work.shapes, segment.name
        grad = (Place("g", name),) if segment.trainable else ()
        kept = kept_places(segment, 0, 0) if comes_back else ()
        lost = () if segment.activations == "keep" else kept
        there: Kind | None = Kind.FORWARD if segment.kind == "block" else None
        back = {"block": Kind.BACKWARD, "head": Kind.HEAD}.get(segment.kind) if comes_back else None
        on_device, on_host = segment.updates_on_device, segment.trainable and not segment.updates_on_device
        update_s = self._op_s(Kind.UPDATE, name, Lane.COMPUTE if on_device else Lane.HOST) if segment.trainable else 0.0
        home, state = Place("disk.w", name), Place("disk.state", name)
        changed = (*((state,) if segment.state_on_disk else ()), *((home,) if segment.weights_on_disk else ()))
        return _Part(
            forward_s=self._visits_s(there, name, (), kept),
            backward_s=self._visits_s(back, name, kept, grad),
            again_s=self._visits_s(back, name, lost, grad),
            sums_s=sum(self._op_s(kind, name, Lane.COMPUTE, (), grad) for kind in (Kind.ZERO, Kind.NORM) if grad),
            device_s=update_s if on_device else 0.0,
            host_s=update_s if on_host else 0.0,
            fetched_bytes=sizes.weights_bytes(shapes, name) if segment.weights == "pool" else 0,
            own_bytes=sizes.weights_bytes(shapes, name) if segment.weights == "own" and not on_device else 0,
            drained_bytes=sizes.gradient_bytes(shapes, name) if on_host else 0,
            input_bytes=sizes.one_boundary_bytes(shapes) * self._work.num_micro_batches,
            weights_s=self._op_s(Kind.LOAD, name, Lane.DISK_READ, (home,), (Place("land.w", 0),))
            if segment.weights_on_disk
            else 0.0,
            state_s=self._op_s(Kind.LOAD_STATE, name, Lane.DISK_READ, (state,), (Place("land.state", 0),))
            if segment.state_on_disk
            else 0.0,
            spill_s=self._op_s(Kind.SPILL, name, Lane.DISK, changed, changed) if changed and on_host else 0.0,
        )

    def _visits_s(self, kind: Kind | None, name: str, reads: tuple[Place, ...], writes: tuple[Place, ...]) -> float:
        """Of all micro-batches."""
        if kind is None:
            return 0.0
        return self._work.num_micro_batches * self._op_s(kind, name, Lane.COMPUTE, reads, writes, 0)

    def _op_s(self, kind: Kind, name: str, lane: Lane, reads: tuple[Place, ...] = (), writes: tuple[Place, ...] = (),
              micro_batch: int | None = None) -> float:  # fmt: skip
        return self._work.costs.seconds(Op(kind, name, micro_batch, lane, reads, writes))


class _Along:
    """Least seconds of a pass by its stretches of blocks placed alike: what shares a slot cannot travel during another
    stretch, but for what the slots hold when this one begins or ends. Where some of the blocks need the disk, it rests
    during the others."""

    def __init__(
        self, plan: Plan, parts: Sequence[_Part], num_rounds: int, link_s: Callable[[float, float], float]
    ) -> None:
        self._plan, self._blocks, self._ends = plan, parts[1:-1], (parts[0], parts[-1])
        self._num_rounds, self._link_s = num_rounds, link_s
        edges = [0, *accumulate(len(list(alike)) for _, alike in groupby(plan.blocks, key=_ways))]
        self._stretches = [slice(*both) for both in pairwise(edges)]
        waiting = set(plan.waiting_in_ram)
        self._inputs = [part.input_bytes / num_rounds * (i in waiting) for i, part in enumerate(self._blocks)]
        self._sums = [
            part.drained_bytes * (block.grads == "pool") for block, part in zip(plan.blocks, self._blocks, strict=True)
        ]

    def forward_s(self, updates: bool) -> float:
        """Of one round. `updates`: those on the device, of the step before, are still to be done."""

        def device_s(parts: Sequence[_Part]) -> float:
            return sum(part.forward_s / self._num_rounds + updates * part.device_s for part in parts)

        total_s = device_s(self._ends)
        for here in self._stretches:  # the first input of a stretch may have left before it
            link_s = self._link_s(self._fetched(here), _beyond(self._plan.act_slots + 1, self._inputs[here]))
            total_s += max(device_s(self._blocks[here]), link_s, self._read_s(here))
        return total_s

    def backward_s(self, drains: bool) -> float:
        """Of all rounds. `drains`: sums of gradients go home, and in each round but the first come back."""
        first = max(1, self._plan.lowest_trainable) - 1  # of the blocks that the pass visits
        total_s = sum(part.backward_s for part in self._ends)
        for stretch in self._stretches:
            here = slice(max(first, stretch.start), max(first, stretch.stop))
            device_s = sum(part.backward_s for part in self._blocks[here]) / self._num_rounds
            comes = self._fetched(here) + _beyond(self._plan.act_slots, self._inputs[here])
            sums = drains * _beyond(self._plan.grad_slots, self._sums[here])
            least_s = max(device_s, self._read_s(here))
            total_s += max(least_s, self._link_s(comes, sums))
            total_s += (self._num_rounds - 1) * max(least_s, self._link_s(comes + sums, sums))
        return total_s

    def _fetched(self, here: slice) -> float:
        return _beyond(self._plan.weight_slots, [part.fetched_bytes for part in self._blocks[here]])

    def _read_s(self, here: slice) -> float:
        slots = self._plan.weight_slots + self._plan.disk_slots
        return _beyond(slots, [part.weights_s for part in self._blocks[here] if part.fetched_bytes])


def _ways(block: SegmentPlan) -> tuple[str, ...]:
    """What sets apart how blocks travel, and how long they take."""
    return block.weights, block.grads, block.weights_home, block.activations


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


def _sum(parts: Sequence[_Part]) -> _Part:
    return parts[0] if len(parts) == 1 else _Part(*map(sum, zip(*parts, strict=True)))


def _beyond(slots: int, each: Sequence[float]) -> float:
    """The sum of `each` but for the largest, of which there is one in each slot."""
    return sum(sorted(each)[: max(0, len(each) - slots)])

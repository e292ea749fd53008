"""Floor: a time that no simulation of a plan can beat, from sums alone. No torch."""

from __future__ import annotations

from megatrain.planner import sizes
from megatrain.planner.account import Question
from megatrain.planner.costs import UNKNOWN_DISK_Bps
from megatrain.schedule.build import rounds
from megatrain.schedule.ops import Kind, Lane, Op, Place
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.schedule.slots import kept_places

BESIDE_SHARE = 0.03  # of what other lanes do beside the device: hidden in simulated time, never quite in real time


class Floor:
    """A lower bound of a plan's step, from sums alone: an update on the host must be over before the forward of its
    segment, and after that all arithmetic of that forward and of what follows is still to come; and the link must carry
    what the blocks that stream need, and the disk what lives there."""

    def __init__(self, question: Question) -> None:
        work = question.work
        self._model = work.costs
        self._num_micro_batches = work.num_micro_batches
        self._work = work
        self._known: dict[tuple[SegmentPlan, bool], tuple[float, float, float]] = {}

    def __call__(self, plan: Plan) -> float:
        rates, shapes = self._work.rates, self._work.shapes
        lowest = plan.lowest_trainable
        passes = [self._passes_s(segment, index >= lowest) for index, segment in enumerate(plan.segments)]
        forward = [forward_s for forward_s, _, _ in passes]
        backward_s = sum(backward for _, backward, _ in passes)
        (link_s, beside_s), disk_s = self._link_s(plan), self._disk_s(plan)
        floor_s, host_s = max(sum(map(sum, passes)), link_s, disk_s), 0.0
        for index, segment in enumerate(plan.segments):
            if segment.updates_on_device:
                continue
            host_s += self._update_s(segment, Lane.HOST)
            fetch_s = sizes.weights_bytes(shapes, segment.name) / rates.h2d_Bps
            if plan.clip_mode == "deferred":
                floor_s = max(floor_s, host_s + fetch_s + backward_s + sum(forward[index:]))
        if plan.clip_mode == "two-pass":
            floor_s = max(floor_s, sum(forward) + 2 * backward_s)
        return floor_s + rates.step_s + BESIDE_SHARE * (beside_s + host_s + disk_s)

    def _link_s(self, plan: Plan) -> tuple[float, float]:
        """What the link must carry: (the least that takes, the work of its lanes). Weights once a round for each
        direction that visits them, but for what the slots hold at its turns; sums of shared slots home, but for those
        used up on the device, and back for every round but the first; inputs that wait in RAM, both ways."""
        shapes, rates = self._work.shapes, self._work.rates
        num_rounds = len(rounds(self._num_micro_batches, plan.round_micro_batches))
        travel = 0
        for visited in (plan.blocks, plan.segments[max(1, plan.lowest_trainable) : -1]):
            weights = sorted(sizes.weights_bytes(shapes, s.name) for s in visited if s.weights == "pool")
            travel += sum(weights[: max(0, len(weights) - plan.weight_slots)])
        shared = [s for s in plan.blocks if s.trainable and s.grads == "pool"]
        drained = [sizes.gradient_bytes(shapes, s.name) for s in shared if not s.updates_on_device]
        sums = sum(drained) if len(shared) > plan.grad_slots else 0
        inputs = self._num_micro_batches * len(plan.waiting_in_ram) * sizes.one_boundary_bytes(shapes)
        h2d_bytes = num_rounds * travel + (num_rounds - 1) * sums + inputs
        d2h_bytes = num_rounds * sums + inputs
        h2d_s, d2h_s = h2d_bytes / rates.h2d_Bps, d2h_bytes / rates.d2h_Bps
        return max(h2d_s, d2h_s, (h2d_bytes + d2h_bytes) / rates.link_both_Bps), h2d_s + d2h_s

    def _disk_s(self, plan: Plan) -> float:
        """What lives on disk, read and written once: both share its time."""
        shapes, rates = self._work.shapes, self._work.rates
        num_bytes = sum(sizes.state_bytes(shapes, s.name) for s in plan.segments if s.state_on_disk)
        num_bytes += sum(
            sizes.weights_bytes(shapes, s.name) for s in plan.segments if s.weights_on_disk and s.trainable
        )
        return sum(num_bytes / (Bps or UNKNOWN_DISK_Bps) for Bps in (rates.disk_read_Bps, rates.disk_write_Bps))

    def _passes_s(self, segment: SegmentPlan, comes_back: bool) -> tuple[float, float, float]:
        """`_pass_s`, looked up."""
        known = self._known.get((segment, comes_back))
        if known is None:
            known = self._known[segment, comes_back] = self._pass_s(segment, comes_back)
        return known

    def _pass_s(self, segment: SegmentPlan, comes_back: bool) -> tuple[float, float, float]:
        """(forward, backward, sums and update on the device) of a segment over all micro-batches. `comes_back`: the
        backward pass reaches it; below the lowest trainable segment nothing is kept and nothing recomputed."""
        grad = (Place("g", segment.name),) if segment.trainable else ()
        kept = kept_places(segment, 0, 0) if comes_back else ()
        rest_s = self._update_s(segment, Lane.COMPUTE) if segment.updates_on_device else 0.0
        rest_s += sum(self._op_s(kind, segment, (), grad) for kind in (Kind.ZERO, Kind.NORM) if segment.trainable)
        if segment.kind == "embed":
            return 0.0, 0.0, rest_s
        if segment.kind == "head":
            return 0.0, self._num_micro_batches * self._op_s(Kind.HEAD, segment, (), grad), rest_s
        forward_s = self._op_s(Kind.FORWARD, segment, (), kept)
        backward_s = self._op_s(Kind.BACKWARD, segment, kept, grad) if comes_back else 0.0
        return self._num_micro_batches * forward_s, self._num_micro_batches * backward_s, rest_s

    def _update_s(self, segment: SegmentPlan, lane: Lane) -> float:
        if not segment.trainable:
            return 0.0
        return self._model.seconds(Op(Kind.UPDATE, segment.name, None, lane, (), ()))

    def _op_s(self, kind: Kind, segment: SegmentPlan, reads: tuple[Place, ...], writes: tuple[Place, ...]) -> float:
        micro_batch = None if kind in (Kind.ZERO, Kind.NORM) else 0
        return self._model.seconds(Op(kind, segment.name, micro_batch, Lane.COMPUTE, reads, writes))

"""Predict: seconds of a step, by running the real schedule of a plan in simulated time. No torch.

A step is the train program with what the step before left pending: the steady state, since a program starts and ends
with all lanes idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from megatrain.hardware.rates import Rates
from megatrain.planner.costs import CostModel, VisitCosts
from megatrain.planner.sizes import Shapes
from megatrain.schedule.build import build, rounds
from megatrain.schedule.ops import Kind, Lane, Schedule
from megatrain.schedule.plan import Plan
from megatrain.schedule.simulate import simulate

MOST_ROUNDS = 3  # simulated; those between the first and the last are alike
BOUNDS = {
    Lane.COMPUTE: "the device's arithmetic",
    Lane.H2D: "the link to the device",
    Lane.D2H: "the link from the device",
    Lane.HOST: "the CPU optimizer, on host memory",
    Lane.DISK: "writing to the disk",
    Lane.DISK_READ: "reading from the disk",
}


@dataclass(frozen=True)
class Workload:
    """What a step has to do on which machine."""

    shapes: Shapes
    rates: Rates
    num_micro_batches: int
    document_tokens: int
    on_cpu: bool

    @cached_property
    def costs(self) -> CostModel:
        """What ops cost; looked up again and again by every simulation of it."""
        return CostModel(self.shapes, self.rates, self.document_tokens, self.on_cpu)


@dataclass(frozen=True)
class Prediction:
    """`lanes_s`: seconds in which each lane is busy; `work_s`: if its ops had their resources to themselves.
    `critical_s`: of each (lane, kind) on the path that sets the step's length. `schedule` and `times_s` are of the
    program that was simulated: at most three rounds, an op standing for all micro-batches of its visit."""

    step_s: float
    lanes_s: Mapping[Lane, float]
    work_s: Mapping[Lane, float]
    critical_s: Mapping[tuple[Lane, Kind], float]
    schedule: Schedule
    times_s: tuple[tuple[float, float], ...]  # (start, end) of each op

    @property
    def bound_lane(self) -> Lane:
        """The lane that has most of the critical path."""
        share = {lane: sum(s for (own, _), s in self.critical_s.items() if own is lane) for lane in Lane}
        return max(share, key=share.__getitem__)

    @property
    def bound(self) -> str:
        """What would have to be faster for the step to be shorter."""
        return BOUNDS[self.bound_lane]

    @property
    def bound_share(self) -> float:
        """Of the step's time that the bound takes; the rest is waiting for something else."""
        total_s = sum(self.critical_s.values())
        bound_s = sum(s for (lane, _), s in self.critical_s.items() if lane is self.bound_lane)
        return bound_s / total_s if total_s else 1.0


def predict(work: Workload, plan: Plan) -> Prediction:
    """The price of `plan` in seconds."""
    num_rounds = len(rounds(work.num_micro_batches, plan.round_micro_batches))
    costs = VisitCosts(work.costs, work.num_micro_batches / num_rounds)
    lanes_s, work_s = dict.fromkeys(Lane, 0.0), dict.fromkeys(Lane, 0.0)
    critical_s: dict[tuple[Lane, Kind], float] = {}
    more = max(0, num_rounds - MOST_ROUNDS)  # rounds like the one between the last two turns
    ops = step_of(replace(plan, round_micro_batches=1), min(num_rounds, MOST_ROUNDS))
    made = simulate(ops, costs.seconds, costs.sharing())
    since_s, until_s = (made.finish_s[turn] for turn in _turns(ops)[-2:]) if more else (0.0, 0.0)
    critical = set(made.critical_path)
    for index, (op, times) in enumerate(zip(ops, times_in_step(ops, num_rounds), strict=True)):
        work_s[op.lane] += times * made.alone_s[index]
        start_s, finish_s = made.start_s[index], made.finish_s[index]
        seconds = finish_s - start_s + more * max(0.0, min(finish_s, until_s) - max(start_s, since_s))
        lanes_s[op.lane] += seconds
        if index in critical:
            critical_s[op.lane, op.kind] = critical_s.get((op.lane, op.kind), 0.0) + seconds
    step_s = work.rates.step_s + made.makespan_s + more * (until_s - since_s)
    times_s = tuple(zip(made.start_s, made.finish_s, strict=True))
    return Prediction(step_s, lanes_s, work_s, critical_s, ops, times_s)


def step_of(plan: Plan, num_micro_batches: int) -> Schedule:
    """All ops of a step among others; of a model that is only read, of its evaluation."""
    read_only = plan.lowest_trainable == len(plan.segments)
    return build(plan, "eval" if read_only else "train", num_micro_batches, pending_update=not read_only)


def times_in_step(schedule: Schedule, num_rounds: int) -> list[int]:
    """How often each op of a schedule of at most MOST_ROUNDS counts in a step of `num_rounds`: those of the round
    between the last two turns also stand for the rounds that are left out."""
    more = max(0, num_rounds - MOST_ROUNDS)
    since, until = _turns(schedule)[-2:] if more else (0, 0)
    return [1 + more if since < index <= until else 1 for index in range(len(schedule))]


def _turns(schedule: Schedule) -> list[int]:
    """Where each round comes to the turn of its pass: from one to the next, a whole round goes by."""
    return [index for index, op in enumerate(schedule) if op.kind in (Kind.HEAD, Kind.LOSS)]

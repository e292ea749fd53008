"""Predict: seconds of a step, by running the real schedule of a plan in simulated time. No torch.

A step is the train program with the update of the step before pending: the steady state, since a program starts and
ends with all lanes idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from megatrain.hardware.rates import Rates
from megatrain.planner.costs import CostModel
from megatrain.planner.sizes import Shapes
from megatrain.schedule.build import build, rounds
from megatrain.schedule.ops import Kind, Lane, Op, Schedule
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.schedule.simulate import Simulation, simulate

MOST_ROUNDS = 3  # simulated; rounds after the second are alike
EDGE_BLOCKS = 4  # at both ends, where a pass fills and drains, blocks are never taken together
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


@dataclass(frozen=True)
class Prediction:
    """`lanes_s`: seconds of work of each lane. `critical_s`: of each (lane, kind) on the path that sets the step's
    length. `schedule` and `simulation` are of the program that was simulated: at most three rounds, an op standing
    for all micro-batches of its visit."""

    step_s: float
    lanes_s: Mapping[Lane, float]
    critical_s: Mapping[tuple[Lane, Kind], float]
    schedule: Schedule
    simulation: Simulation

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


def predict(work: Workload, plan: Plan, most_groups: int | None = None) -> Prediction:
    """The price of `plan` in seconds. `most_groups`: blocks placed alike are taken together until about so many are
    left, which costs a per cent or two of truth and saves most of the time; None: every block by itself."""
    parts = rounds(work.num_micro_batches, plan.round_micro_batches)
    folded, members = (plan, {}) if most_groups is None else fold(plan, most_groups)
    visits = replace(folded, round_micro_batches=1)
    model = CostModel(
        work.shapes,
        work.rates,
        work.document_tokens,
        work.on_cpu,
        visit_micro_batches=work.num_micro_batches / len(parts),
        members=members,
    )
    runs = [_run(visits, model, count) for count in range(min(2, len(parts)), min(MOST_ROUNDS, len(parts)) + 1)]
    schedule, simulation = runs[-1]
    lanes_s, step_s = dict(simulation.busy_s), simulation.makespan_s
    more = len(parts) - MOST_ROUNDS
    if more > 0:
        before = runs[-2][1]
        step_s += more * (simulation.makespan_s - before.makespan_s)
        lanes_s = {lane: s + more * (s - before.busy_s[lane]) for lane, s in lanes_s.items()}
    critical_s: dict[tuple[Lane, Kind], float] = {}
    for index in simulation.critical_path:
        op = schedule[index]
        seconds = simulation.finish_s[index] - simulation.start_s[index]
        critical_s[op.lane, op.kind] = critical_s.get((op.lane, op.kind), 0.0) + seconds
    return Prediction(step_s + work.rates.step_s, lanes_s, critical_s, schedule, simulation)


def _run(plan: Plan, model: CostModel, num_rounds: int) -> tuple[Schedule, Simulation]:
    """A model of which nothing is trained is only read."""
    trains = plan.lowest_trainable < len(plan.segments)
    schedule = build(plan, "train" if trains else "eval", num_rounds, pending_update=trains)
    return schedule, simulate(schedule, model.seconds, model.sharing())


def fold(plan: Plan, most_groups: int) -> tuple[Plan, Mapping[str, Sequence[str]]]:
    """A plan of fewer blocks, and which blocks of `plan` each of them stands for."""
    blocks = plan.blocks
    middle = blocks[EDGE_BLOCKS : len(blocks) - EDGE_BLOCKS]
    room = most_groups - 2 * EDGE_BLOCKS
    if len(middle) <= room:
        return plan, {}
    size = -(-len(middle) // room)
    groups: list[Sequence[SegmentPlan]] = [[block] for block in blocks[:EDGE_BLOCKS]]
    for _, alike in groupby(middle, key=lambda block: replace(block, name="")):
        run = list(alike)
        groups += [run[start : start + size] for start in range(0, len(run), size)]
    groups += [[block] for block in blocks[len(blocks) - EDGE_BLOCKS :]]
    names = [f"L{number:03d}" for number in range(len(groups))]
    folded = [replace(group[0], name=name) for name, group in zip(names, groups, strict=True)]
    members = {name: [block.name for block in group] for name, group in zip(names, groups, strict=True)}
    return replace(plan, segments=(plan.segments[0], *folded, plan.segments[-1])), members


def label(op: Op) -> str:
    """An op in words: "FORWARD L003"."""
    return f"{op.kind} {op.segment}".strip()

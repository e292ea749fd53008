"""Occupancy: bytes in use in each tier while a schedule runs. No torch.

Homes are in use from the first moment to the last. A slot, an activation or a gradient is in use from the start of the
op that gives it new content to the end of the last op that touches that content; working memory while its op runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from megatrain.planner import sizes
from megatrain.planner.account import Question, framework_bytes, home_rows
from megatrain.planner.costs import content_bytes
from megatrain.planner.ledger import Ledger
from megatrain.planner.sizes import Shapes
from megatrain.schedule.ops import Kind, Op, Place, Schedule
from megatrain.schedule.plan import Plan, Tier

# Kind of op -> what it takes while it runs.
WORKING: Mapping[Kind, Callable[[Shapes, Op], int]] = {
    Kind.BACKWARD: lambda shapes, op: sizes.backward_working_bytes(
        shapes, op.segment, is_kept=any(place.pool == "kept" for place in op.reads)
    ),
    Kind.HEAD: lambda shapes, _op: sizes.head_working_bytes(shapes),
    Kind.EMBED_BACKWARD: lambda shapes, _op: sizes.embedding_working_bytes(shapes),
}


class Level(NamedTuple):
    """From `time_s` on, `num_bytes` are in use."""

    time_s: float
    num_bytes: int


def occupancy(
    question: Question, plan: Plan, schedule: Schedule, times_s: Sequence[tuple[float, float]], per_visit: int = 1
) -> Mapping[Tier, list[Level]]:
    """Levels of every tier but the disk. `times_s`: (start, end) of each op. `per_visit`: micro-batches that one op
    stands for."""
    changes: dict[Tier, list[tuple[float, int]]] = {"hbm": [], "ram": []}
    tier = question.machine_tier
    resident = {segment.name for segment in plan.segments if segment.state == "hbm"}
    for place, segment, start_s, end_s in _lives(schedule, times_s, resident):
        count = 1 if place.micro_batch is None else per_visit
        num_bytes = count * content_bytes(question.shapes, place, segment)
        changes[tier] += [(start_s, num_bytes), (end_s, -num_bytes)]
    for op, (start_s, end_s) in zip(schedule, times_s, strict=True):
        if op.kind in WORKING:
            working = WORKING[op.kind](question.shapes, op)
            changes[tier] += [(start_s, working), (end_s, -working)]
    levels: dict[Tier, list[Level]] = {}
    for name, home_bytes in _home_bytes(question, plan).items():
        levels[name] = _levels(home_bytes, changes[name])
    return levels


def _home_bytes(question: Question, plan: Plan) -> dict[Tier, int]:
    shapes, device = question.shapes, question.machine.device
    resident = [segment.name for segment in plan.segments if segment.state == "hbm"]
    homes = sum(sizes.weights_bytes(shapes, name) + sizes.state_bytes(shapes, name) for name in resident)
    ram = sizes.program_ram_bytes(shapes, device) + sum(
        row.num_bytes for row in home_rows(Ledger(question.entries, plan)) if row.tier == "ram"
    )
    if device == "cpu":
        return {"ram": ram}
    return {"hbm": homes + sum(framework_bytes(question, plan).values()), "ram": ram}


def _lives(
    schedule: Schedule, times_s: Sequence[tuple[float, float]], resident: set[str]
) -> Iterator[tuple[Place, str, float, float]]:
    """(place, segment, start, end) of every content of a place that is no home."""
    alive: dict[Place, tuple[str, float, float]] = {}
    for op, (start_s, end_s) in zip(schedule, times_s, strict=True):
        for place in dict.fromkeys((*op.reads, *op.writes)):
            if _is_home(place, resident):
                continue
            if place in alive and not _renews(op, place):
                segment, since_s, last_s = alive[place]
                alive[place] = segment, since_s, max(last_s, end_s)
                continue
            if place in alive:
                yield place, *alive[place]
            # what is read before it is written was left by the program before
            alive[place] = op.segment, start_s if _renews(op, place) else 0.0, end_s
    for place, life in alive.items():
        yield place, *life


def _renews(op: Op, place: Place) -> bool:
    return place in op.writes and place not in op.reads


def _is_home(place: Place, resident: set[str]) -> bool:
    if place.pool.startswith(("ram.", "hbm.", "disk.", "file", "land.")):  # landing slots are reserved throughout
        return True
    return place.pool == "w" and place.key in resident


def _levels(home_bytes: int, changes: list[tuple[float, int]]) -> list[Level]:
    levels, num_bytes = [Level(0.0, home_bytes)], home_bytes
    for time_s, change in sorted(changes):  # at one moment what ends goes first
        num_bytes += change
        if levels[-1].time_s == time_s:
            levels[-1] = Level(time_s, num_bytes)
        else:
            levels.append(Level(time_s, num_bytes))
    return levels

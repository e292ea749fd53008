"""Cheapest: of the family's plans that fit, the fastest in simulated time. No torch.

Wear of the disk is counted as time. Most plans are left out by their floor, best first.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from megatrain.planner import changes, sizes
from megatrain.planner.account import Question, memory_table
from megatrain.planner.changes import Filling, changed_at, steps_of
from megatrain.planner.family import filled, fillings, placed, smallest, to_read, trains, without_idle_slots
from megatrain.planner.floor import BESIDE_SHARE, Floor
from megatrain.planner.prediction import predict
from megatrain.schedule.ops import Lane
from megatrain.schedule.plan import Plan

WEAR_S = 300e-12  # a byte written: 1 TB of a drive's endurance costs about what five minutes of a GPU do
HELD_S = 1e-16  # a byte of the device: 100 GB of it outweigh no more than 10 us


@dataclass(frozen=True, order=True)
class _Candidate:
    """A plan that fits, and a time that no simulation of it can beat; or of anything that is made of it, if there may
    be room for more."""

    floor_s: float
    turn: int  # the later, the larger: of equal ones the first is taken first
    plan: Plan = field(compare=False)
    is_full: bool = field(compare=False)


def search(question: Question) -> Plan:
    """The cheapest plan of the family that fits with something to spare, of the disk if can be: checkpoints need the
    same of it under every plan. If there is none, the smallest plan there is."""
    if not trains(question.shapes.spec):
        return to_read(question)
    with _uncollected():
        return _cheapest(question) or _cheapest(replace(question, to_the_brim=("disk",))) or smallest(question)


def _cheapest(question: Question) -> Plan | None:
    """The least likely to be beaten first: what is filled up or simulated is what could still be the cheapest."""
    floor, ways, seen, turns = Floor(question), fillings(question), set[Plan](), count()
    heap: list[_Candidate] = []

    def note(plan: Plan, is_full: bool) -> None:
        least_s = floor(plan) if is_full else floor.least(*lightest(plan, ways[0]))
        heappush(heap, _Candidate(least_s + wear_s(question, plan), next(turns), plan, is_full))

    for start in placed(question):
        note(start, is_full=False)
    best, best_s = None, float("inf")
    while heap and heap[0].floor_s < best_s:
        first = heappop(heap)
        if first.is_full:
            found_s = cost_s(question, first.plan)
            if found_s < best_s:
                best, best_s = first.plan, found_s
            continue
        for plan in (without_idle_slots(question, made) for made in filled(question, first.plan, *ways)):
            if plan not in seen:
                seen.add(plan)
                note(plan, is_full=True)
    return best


def lightest(plan: Plan, attention: Filling) -> tuple[Plan, Plan]:
    """`plan` with all that could ever be kept on the device, and with all that attention gives: of both together no
    filling is faster."""
    blocks = range(1, len(plan.segments) - 1)
    return changed_at(plan, blocks, changes.ALL_KEPT), steps_of(plan, attention)(len(attention))


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for garbage in rings: a million tuples are made here, and none. Among all that torch and transformers
    hold it took a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def cost_s(question: Question, plan: Plan) -> float:
    """What the search makes small: seconds of a step, and as seconds its wear of the disk, what other lanes do, and,
    to choose between plans that are as fast, the memory it takes."""
    made = predict(question.work, plan)
    beside_s = sum(seconds for lane, seconds in made.work_s.items() if lane is not Lane.COMPUTE)
    taken_bytes = memory_table(question, plan).total_bytes(question.machine_tier)
    return made.step_s + BESIDE_SHARE * beside_s + HELD_S * taken_bytes + wear_s(question, plan)


def wear_s(question: Question, plan: Plan) -> float:
    """What a step writes to the disk, as seconds."""
    return WEAR_S * sizes.step_written_bytes(question.shapes, plan) if plan.disk_slots else 0.0

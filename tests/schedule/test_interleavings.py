"""Brute force on tiny models: every order that lanes and waits permit computes the reference; no wait is spare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.schedule import Lane, Plan, Run
from tests.schedule.plans import (
    DEVICE,
    DISK,
    DISK_STATE,
    OWN_DEVICE,
    OWN_RAM,
    RESIDENT,
    RESIDENT_POOLED,
    STREAMED,
    plan_of,
    runs_of,
)
from tests.schedule.symbols import Terms, explore, homes_only, in_order, reference, results_of, start

TINY = {
    "streamed": plan_of([STREAMED] * 3),
    "one gradient slot, two rounds": plan_of([STREAMED] * 2, grad_slots=1, round_micro_batches=1),
    "tied, mixed, kept": plan_of([STREAMED, RESIDENT, STREAMED], embed=RESIDENT, tied=True, keep=["L002"]),
    "tied in ram, two rounds": plan_of([STREAMED, OWN_RAM], tied=True, round_micro_batches=1),
    "state streamed": plan_of([STREAMED, OWN_DEVICE], embed=OWN_DEVICE, tied=True, slots=1),
    "state streamed, two rounds": plan_of([DEVICE, STREAMED], head=OWN_DEVICE, round_micro_batches=1),
    "on disk": plan_of([{**STREAMED, **DISK}, STREAMED], frozen=["EMBED"], head={**OWN_RAM, **DISK}),
    "on disk, one landing slot": plan_of(
        [{**STREAMED, **DISK_STATE}, {**STREAMED, **DISK}], frozen=["EMBED"], head=RESIDENT, disk_slots=1
    ),
    "inputs offloaded": plan_of([STREAMED] * 4, frozen=["EMBED", "HEAD"], offload=["L000", "L001", "L002", "L003"]),
    "two passes": plan_of([STREAMED, RESIDENT_POOLED], embed=RESIDENT, tied=True, two_pass=True, grad_slots=1),
    "two passes, inputs offloaded": plan_of(
        [STREAMED] * 3, frozen=["EMBED", "HEAD"], offload=["L000", "L001", "L002"], two_pass=True
    ),
    "two passes, on disk": plan_of(
        [{**STREAMED, **DISK_STATE}] * 2, frozen=["EMBED"], head=RESIDENT, disk_slots=1, two_pass=True, grad_slots=1
    ),
    "frozen below": plan_of([STREAMED] * 3, frozen=["EMBED", "L000"], tied=True, head=RESIDENT),
}


def memory_before(plan: Plan, runs: list[Run], terms: Terms) -> dict:
    """Memory before the last of `runs`, the others run in order."""
    memory = start(plan, terms)
    for run in runs[:-1]:
        memory = homes_only(plan, next(explore(run.schedule, memory, terms)), run.program)
    return memory


@pytest.mark.parametrize("plan", TINY.values(), ids=TINY)
@pytest.mark.parametrize("last", ["train", "eval", "save", "flush"])
def test_every_order_computes_the_reference(plan: Plan, last: str) -> None:
    runs = runs_of(plan, ["train", last])
    terms = Terms()
    expected = reference(plan, runs, terms)[-1]
    outcomes = [
        results_of(plan, runs[-1], m) for m in explore(runs[-1].schedule, memory_before(plan, runs, terms), terms)
    ]
    assert outcomes
    assert all(outcome == expected for outcome in outcomes)


@pytest.mark.parametrize("plan", TINY.values(), ids=TINY)
def test_without_any_one_wait_some_order_is_wrong(plan: Plan) -> None:
    """So waits are minimal. The flush afterwards shows what a spoiled gradient home does."""
    runs = runs_of(plan, ["train", "train", "flush"])
    terms = Terms()
    expected = reference(plan, runs, terms)
    before = memory_before(plan, runs[:2], terms)
    schedule = runs[1].schedule
    num_waits = 0
    for index, op in enumerate(schedule):
        for wait in op.waits:
            num_waits += 1
            mutant = list(schedule)
            mutant[index] = replace(op, waits=tuple(w for w in op.waits if w != wait))
            assert any(
                results_of(plan, runs[1], memory) != expected[1] or flushed(plan, runs, memory, terms) != expected[2]
                for memory in explore(tuple(mutant), before, terms)
            ), f"{op} does not need {wait}"
    assert num_waits >= 9


def flushed(plan: Plan, runs: list[Run], memory: dict, terms: Terms) -> dict:
    before = homes_only(plan, memory, runs[-2].program)
    return results_of(plan, runs[-1], next(explore(runs[-1].schedule, before, terms)))


def test_the_oracle_tells_orders_apart() -> None:
    """An explorer that saw one order only would pass everything: without waits there must be many outcomes."""
    plan = TINY["one gradient slot, two rounds"]
    runs = runs_of(plan, ["train", "train"])
    bare = tuple(replace(op, waits=()) for op in runs[1].schedule if op.lane in (Lane.HOST, Lane.H2D))
    terms = Terms()
    assert len({frozenset(m.items()) for m in explore(bare, memory_before(plan, runs, terms), terms)}) > 10
    assert in_order(plan, runs, terms) == reference(plan, runs, terms)

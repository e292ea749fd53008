"""The checker finds every seeded fault; what it lets pass is proven harmless by running the terms (symbols.py)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from megatrain.schedule import Plan, Program, Run, Schedule, ScheduleError, check
from tests.schedule import mutants
from tests.schedule.plans import (
    DEVICE,
    DISK,
    DISK_STATE,
    DISK_WEIGHTS,
    OWN_DEVICE,
    OWN_RAM,
    RESIDENT,
    RESIDENT_POOLED,
    STREAMED,
    plan_of,
    runs_of,
)
from tests.schedule.symbols import Terms, explore, homes_only, in_order, reference, results_of, start

MIXED = [RESIDENT, STREAMED, OWN_RAM, {"weights": "own", "grads": "pool", "state": "ram"}]
PLANS = {
    "S=2": plan_of(),
    "S=3, two rounds": plan_of(slots=3, round_micro_batches=1),
    "S=2, one gradient slot, two rounds, kept": plan_of(grad_slots=1, round_micro_batches=1, keep=["L000", "L003"]),
    "attention kept, two rounds": plan_of(
        round_micro_batches=1, keep=["L001"], keep_attention=["L000", "L002", "L003"], frozen=["EMBED", "L000"]
    ),
    "tied": plan_of(tied=True, slots=3),
    "tied in hbm, two rounds": plan_of(tied=True, embed=RESIDENT, round_micro_batches=1),
    "mixed homes": plan_of(MIXED, head=RESIDENT, keep=["L001", "L002"]),
    "mixed homes, tied, two rounds": plan_of(MIXED, tied=True, round_micro_batches=1, slots=3),
    "all in hbm": plan_of([RESIDENT] * 4, embed=RESIDENT, head=RESIDENT, slots=0, grad_slots=0),
    "state streamed": plan_of([DEVICE, STREAMED, STREAMED], embed=OWN_DEVICE, head=OWN_DEVICE),
    "state streamed, tied, two rounds": plan_of(
        [DEVICE, DEVICE, STREAMED, RESIDENT], embed=OWN_DEVICE, tied=True, round_micro_batches=1, keep=["L001"]
    ),
    "inputs offloaded, two rounds": plan_of(
        [STREAMED, RESIDENT, STREAMED, STREAMED],
        offload=["L000", "L002", "L003"],
        frozen=["EMBED"],
        round_micro_batches=1,
    ),
    "on disk": plan_of([{**STREAMED, **DISK}] * 4, embed={**OWN_RAM, **DISK}, head={**OWN_RAM, **DISK}),
    "here and there on disk, one landing slot": plan_of(
        [STREAMED, {**STREAMED, **DISK_STATE}, {**OWN_RAM, **DISK_WEIGHTS}, {**STREAMED, **DISK}],
        head={**OWN_RAM, **DISK_STATE},
        frozen=["L002"],
        tied=True,
        round_micro_batches=1,
        disk_slots=1,
    ),
    "two passes, on disk": plan_of(
        [{**STREAMED, **DISK_STATE}, RESIDENT_POOLED, {**STREAMED, **DISK_STATE}, {**STREAMED, **DISK}],
        keep=["L001"],
        two_pass=True,
        disk_slots=1,
    ),
    "two passes, inputs offloaded": plan_of(
        [STREAMED, RESIDENT, STREAMED], offload=["L000", "L001", "L002"], frozen=["EMBED"], tied=True, two_pass=True
    ),
    "frozen here and there": plan_of(frozen=["EMBED", "L000", "L002"], keep=["L000", "L002"], round_micro_batches=1),
    "frozen, else streamed": plan_of([OWN_DEVICE] * 2, embed=OWN_DEVICE, frozen=["EMBED", "L001"], slots=0),
    "frozen but tied embedding": plan_of(frozen=["HEAD", "L001"], tied=True),
    "only the head": plan_of(frozen=["EMBED", "L000", "L001", "L002", "L003"], tied=True),
}
SEQUENCES: dict[str, tuple[list[Program], int]] = {  # which programs, and which of them is spoilt
    "train": (["train", "train", "flush"], 1),
    "eval": (["train", "eval", "train", "flush"], 1),
    "save": (["train", "save", "train", "flush"], 1),
    "flush": (["train", "flush", "train", "save"], 1),
}


def spoilt(runs: list[Run], at: int, schedule: Schedule) -> list[Run]:
    return [*runs[:at], runs[at]._replace(schedule=schedule), *runs[at + 1 :]]


def passing(runs: list[Run], at: int, plan: Plan, faulty: Iterable[tuple[str, Schedule]]) -> tuple[dict, int]:
    """Of `faulty` versions of program `at`, those that the checker lets pass, and how many there were."""
    passed, count = {}, 0
    for name, schedule in faulty:
        count += 1
        try:
            check(spoilt(runs, at, schedule), plan)
        except ScheduleError as error:
            assert "<-- HERE" in str(error)  # noqa: PT017 - most mutants must raise
            continue
        passed[name] = schedule
    return passed, count


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_fault_is_found(plan: Plan, sequence: str) -> None:
    programs, at = SEQUENCES[sequence]
    runs = runs_of(plan, programs)
    check(runs, plan)
    schedule = runs[at].schedule
    counts = {}
    for name, faulty in {
        "waits": mutants.dropped_waits(schedule),
        "places": mutants.wrong_places(schedule, plan),
        "micro-batches": mutants.wrong_micro_batches(schedule, 2),
        "drops": mutants.dropped_ops(schedule),
        "doubles": mutants.doubled_ops(schedule),
    }.items():
        passed, counts[name] = passing(runs, at, plan, faulty)
        assert not passed, f"{name}: not found: {list(passed)}"
    assert counts["drops"] == len(schedule)
    assert counts["doubles"] == 2 * len(schedule)
    assert sequence in ("flush", "save") or (counts["micro-batches"] >= 12 and counts["places"] >= 30)


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_exchanged_neighbours_are_found_or_change_nothing(plan: Plan, sequence: str) -> None:
    """An exchange that passes (two FORWARDs of one layer, say) computes the reference in every order of lanes."""
    programs, at = SEQUENCES[sequence]
    runs = runs_of(plan, programs)
    terms = Terms()
    expected = reference(plan, runs, terms)
    assert in_order(plan, runs, terms) == expected
    passed, _ = passing(runs, at, plan, mutants.swapped_ops(runs[at].schedule))
    for name, schedule in passed.items():
        assert in_order(plan, spoilt(runs, at, schedule), terms) == expected, name
        memory = start(plan, terms)
        for run in runs[:at]:
            memory = homes_only(plan, next(explore(run.schedule, memory, terms)), run.program)
        finals = list(explore(schedule, memory, terms))
        assert len(finals) == 1, name  # every order leaves the same in every place
        assert results_of(plan, runs[at], finals[0]) == expected[at], name


def test_exchanges_that_change_results_are_found() -> None:
    """The other way round: of the exchanges whose terms differ from the reference there are many, and none passes."""
    plan = PLANS["S=3, two rounds"]
    runs = runs_of(plan, ["train", "train", "flush"])
    terms = Terms()
    expected = reference(plan, runs, terms)
    swaps = dict(mutants.swapped_ops(runs[1].schedule))
    harmful = {n: s for n, s in swaps.items() if in_order(plan, spoilt(runs, 1, s), terms) != expected}
    passed, _ = passing(runs, 1, plan, harmful.items())
    assert not passed
    assert len(harmful) >= 40

"""Skipped steps, by brute force: every order that lanes and waits permit, over three programs one after the other.

A step whose loss or gradient is not finite is skipped by its cell: every UPDATE that reads the cell leaves state and
weights as they are. The schedule is the same; here it is shown that this is enough.
"""

from __future__ import annotations

import pytest

from megatrain.schedule import Plan, Program
from tests.schedule.plans import DEVICE, OWN_DEVICE, RESIDENT, STREAMED, plan_of, runs_of
from tests.schedule.symbols import Terms, explore, homes_only, reference, results_of, start

PLANS = {
    "tied, a frozen block between": plan_of([STREAMED] * 3, tied=True, frozen=["L001"]),
    "the same in two rounds, one gradient slot": plan_of(
        [STREAMED] * 3, tied=True, frozen=["L001"], grad_slots=1, round_micro_batches=1
    ),
    "the same, kept, embedding at home": plan_of(
        [STREAMED] * 3, tied=True, frozen=["L001"], embed=RESIDENT, keep=["L000", "L002"]
    ),
    "tied, state streamed": plan_of([STREAMED, DEVICE, STREAMED], embed=OWN_DEVICE, head=OWN_DEVICE, tied=True),
    "frozen up to a block in hbm": plan_of([STREAMED, RESIDENT, STREAMED], frozen=["EMBED", "L000"], tied=True),
}
SEQUENCES: dict[str, list[Program]] = {
    "two steps": ["train", "train", "flush"],
    "saved": ["train", "train", "save"],
    "evaluated, then on": ["train", "train", "eval", "train", "flush"],
}


class Skipping(Terms):
    """Terms in which the cell of step `skipped` (from 0) says: leave everything."""

    def __init__(self, skipped: int) -> None:
        super().__init__()
        self._skipped = skipped
        self._cells: list[int] = []

    def __call__(self, *term: str | int | None) -> int:
        if term[0] in ("state'", "weights'"):
            what, _segment, _gradient, cell, state, weights = term
            if cell in self._cells[self._skipped : self._skipped + 1]:
                kept = state if what == "state'" else weights
                assert isinstance(kept, int)
                return kept
        number = super().__call__(*term)
        if term[0] == "cell" and number not in self._cells:
            self._cells.append(number)
        return number


@pytest.mark.parametrize("sequence", SEQUENCES.values(), ids=SEQUENCES)
@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_order_leaves_what_a_skipped_step_must(plan: Plan, skipped: int, sequence: list[Program]) -> None:
    runs = runs_of(plan, sequence)
    terms = Skipping(skipped)
    expected = reference(plan, runs, terms)
    memory = start(plan, terms)
    num_orders = 0
    for run, wanted in zip(runs, expected, strict=True):
        outcomes = list(explore(run.schedule, memory, terms))
        num_orders += len(outcomes)
        assert all(results_of(plan, run, outcome) == wanted for outcome in outcomes), run.program
        memory = homes_only(plan, outcomes[0], run.program)
    assert num_orders >= len(runs)
    if skipped == 0:  # the same data and weights: step 2 comes to the same cell, and is skipped as well
        first, last = expected[0], expected[-1]
        assert all(last[key] == term for key, term in first.items() if key[0] in ("weights", "state"))


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_skip_is_seen(plan: Plan) -> None:
    """With the skip ignored the results are others: the test above could fail."""
    runs = runs_of(plan, SEQUENCES["two steps"])
    terms = Skipping(1)
    skipping = reference(plan, runs, terms)[-1]
    terms._skipped = -1 if len(terms._cells) > 2 else 0
    assert reference(plan, runs, terms)[-1] != skipping

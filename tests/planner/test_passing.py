"""Updates that pass through the device: how many, when, and what they win where the CPU has too much to do."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from megatrain.cli.show import plan_lines
from megatrain.hardware.described import read_machine
from megatrain.hardware.rates import Rates
from megatrain.planner import Question, memory_table, predict, search
from megatrain.planner.family import without_idle_slots
from megatrain.planner.passing import passing_share, with_passing
from megatrain.schedule import validate
from megatrain.schedule.ops import Kind, Lane
from megatrain.schedule.plan import Plan
from tests.planner.test_planner import spec_of
from tests.planner.test_search import H200, question, with_memory

FEW_CORES = replace(H200.rates, update_params_per_s=1.2e9)  # before a memory that could feed more
SLOW_LINK = replace(FEW_CORES, h2d_Bps=12e9, d2h_Bps=12e9, link_both_Bps=22e9)
DEEP = spec_of(48, 4096)


def asked(rates: Rates, tokens: int = 8192, hbm_gib: float = 24, **keys: object) -> Question:
    made = question(DEEP, max_length=4096, micro_batch_tokens=8192, train_batch_size=tokens // 4096, **keys)
    return with_memory(replace(made, work=replace(made.work, rates=rates)), hbm_gib, 2000)


def on_host(asked: Question) -> Plan:
    """What is chosen where nothing may pass."""
    with patch("megatrain.planner.family.passing_share", return_value=0.0):
        return search(asked)


@pytest.mark.parametrize("rates", [H200.rates, FEW_CORES, SLOW_LINK], ids=["H200", "few cores", "slow link"])
def test_the_share_that_passes_is_as_good_as_any(rates: Rates) -> None:
    """Of a step that waits for updates, all in RAM: no share of a fine row of them is more than 4 % faster."""
    here = asked(rates, clip_mode="deferred")
    plan = on_host(here)
    chosen_s = {}
    for share in [passing_share(here), *(step / 20 for step in range(1, 20))]:
        passing = with_passing(here, plan, share)
        assert passing is not None
        chosen_s[share] = predict(here.work, passing).step_s
    best_s, formula_s = min(chosen_s.values()), chosen_s[passing_share(here)]
    assert formula_s <= 1.04 * best_s, chosen_s
    assert formula_s < 0.95 * predict(here.work, plan).step_s


def test_neither_the_cpu_nor_the_link_bounds_a_step_alone() -> None:
    """With few cores the host's lane was busy for most of the step and the link for little; now both are."""
    here = asked(FEW_CORES)
    plan = search(here)
    before, after = predict(here.work, on_host(here)), predict(here.work, plan)
    assert sum(segment.streams_state for segment in plan.segments) > 20
    assert after.step_s < 0.65 * before.step_s
    assert before.lanes_s[Lane.HOST] > 0.85 * before.step_s
    assert before.lanes_s[Lane.H2D] < 0.3 * before.step_s
    assert after.lanes_s[Lane.HOST] > 0.6 * after.step_s
    assert after.lanes_s[Lane.H2D] > 0.6 * after.step_s


def test_what_passes_is_within_the_budget_and_can_be_followed() -> None:
    for hbm_gib in (16, 24, 48):
        here = asked(FEW_CORES, hbm_gib=hbm_gib)
        plan = search(here)
        validate(plan)
        table = memory_table(here, plan)
        assert table.overall == "FITS"
        slots = next(row for row in table.rows if row.component == "shared state slots")
        largest = max(here.shapes.segment_bytes[s.name][1] for s in plan.segments if s.streams_state)
        assert slots.num_bytes == 2 * largest


def test_plan_says_what_passes() -> None:
    here = asked(FEW_CORES)
    plan, still = search(here), on_host(here)
    count = sum(segment.streams_state for segment in plan.segments)
    said, nothing = ("\n".join(plan_lines(DEEP, p, memory_table(here, p))) for p in (plan, still))
    assert f", {count} segments are updated on the GPU and go home to RAM" in said
    assert "updated on the GPU" not in nothing


def test_nothing_passes_where_the_forward_pass_hides_the_updates() -> None:
    plan = search(asked(H200.rates, tokens=1 << 18))
    assert not any(segment.streams_state for segment in plan.segments)
    assert plan.state_slots == 0


def test_nothing_passes_where_the_host_is_fast_or_the_link_slow_or_there_is_no_gpu() -> None:
    fast = replace(H200.rates, update_params_per_s=2e10)
    assert passing_share(asked(fast)) == 0.0
    slow, usual = (passing_share(asked(rates)) for rates in (SLOW_LINK, FEW_CORES))
    assert 0.1 < slow < usual
    assert (round(usual, 2), round(passing_share(asked(H200.rates)), 2)) == (0.69, 0.27)  # docs/planning.md
    cpu = read_machine("h200-125gb").machine
    assert passing_share(replace(asked(FEW_CORES), machine=replace(cpu, device="cpu"))) == 0.0


def test_states_that_pass_go_there_once_and_back_once_in_a_step() -> None:
    here = asked(FEW_CORES, hbm_gib=16)
    plan = search(here)
    passing = {segment.name for segment in plan.segments if segment.streams_state}
    schedule = predict(here.work, plan).schedule
    for kind in (Kind.FETCH_STATE, Kind.FETCH_GRAD, Kind.STORE, Kind.STORE_STATE):
        assert sorted(op.segment for op in schedule if op.kind is kind) == sorted(passing)
    on_device = {op.segment for op in schedule if op.kind is Kind.UPDATE and op.lane is Lane.COMPUTE}
    assert on_device == passing | {segment.name for segment in plan.segments if segment.state == "hbm"}


def test_no_slots_are_kept_for_states_that_do_not_pass() -> None:
    here = asked(FEW_CORES)
    plan = on_host(here)
    few = with_passing(here, plan, 1.2 / len(plan.segments))
    assert few is not None
    assert sum(segment.streams_state for segment in few.segments) == few.state_slots == 1
    assert without_idle_slots(here, few).state_slots == 1

"""The cost model: every kind of op has a price from shapes and rates, and what is shared is shared."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from megatrain.errors import ConfigError
from megatrain.hardware.described import read_machine
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.planner import Workload, predict
from megatrain.planner.costs import ADD_BYTES, CONTENT_BYTES, LINEAR_SHARE, UPDATE_SHARE, content_bytes
from megatrain.planner.sizes import Shapes, slot_bytes
from megatrain.schedule import Kind, Lane, Op, Place, Plan, Schedule, Use, build
from tests.families import tiny_config
from tests.planner.test_planner import spec_of
from tests.schedule.plans import plan_of

SPEC = spec_of(4, 512)
LAYOUTS = {segment.name: layout_of(segment) for segment in SPEC.segments}
SHAPES = Shapes(SPEC, LAYOUTS, 2, 4096, 1024, compiled=True)
RATES = read_machine("h200-125gb").rates
UPDATE = UPDATE_SHARE * RATES.update_params_per_s
WORK = Workload(SHAPES, RATES, 4, 1024, on_cpu=False)
BLOCK = LAYOUTS["L000"].num_elements


def plan(**changes: str) -> Plan:
    """Four blocks; `changes` of all of them."""
    made = plan_of([{"weights": "pool", "grads": "pool"}] * 4, tied=True)
    segments = tuple(replace(s, **changes) if s.kind == "block" else s for s in made.segments)  # type: ignore[arg-type]
    disk = any("disk" in word for word in changes.values())
    return replace(made, segments=segments, disk_slots=3 if disk else 0, embedding_trainable=True, state_slots=2)


PLANS = [
    plan(),
    plan(activations="keep"),
    plan(state="hbm", weights="own", grads="own"),
    plan(update="device"),
    plan(state="disk"),
    plan(state="disk", weights_home="disk"),
    plan(activations="keep_attention"),
]


def schedules() -> list[Schedule]:
    made = [build(p, "train", 4, True) for p in PLANS] + [build(p, "eval", 4, False) for p in PLANS]
    return made + [build(p, "save", 4, True) for p in PLANS]


def op_of(kind: Kind, schedule: Schedule, segment: str = "L000") -> Op:
    return next(op for op in schedule if op.kind is kind and op.segment == segment)


def test_every_op_of_every_plan_has_a_price() -> None:
    kinds = set()
    for schedule in schedules():
        for op in schedule:
            assert WORK.costs.seconds(op) > 0.0
            kinds.add(op.kind)
    assert set(Kind) - {Kind.FETCH_GRAD, Kind.OFFLOAD, Kind.RELOAD} <= kinds


def test_what_moves_takes_its_bytes_over_the_rate_of_its_lane() -> None:
    train = build(PLANS[0], "train", 4, True)
    assert WORK.costs.seconds(op_of(Kind.FETCH, train)) == pytest.approx(RATES.op_s + 2 * BLOCK / RATES.h2d_Bps)
    assert WORK.costs.seconds(op_of(Kind.DRAIN, train)) == pytest.approx(RATES.op_s + 4 * BLOCK / RATES.d2h_Bps)
    disk = build(PLANS[5], "train", 4, True)
    load, spill = op_of(Kind.LOAD_STATE, disk), op_of(Kind.SPILL, disk)
    assert WORK.costs.seconds(load) == pytest.approx(RATES.op_s + 10 * BLOCK / RATES.disk_read_Bps)
    assert WORK.costs.seconds(spill) == pytest.approx(RATES.op_s + 12 * BLOCK / RATES.disk_write_Bps)


@pytest.mark.parametrize("name", ["backward", "GRAD", ""])
def test_a_factor_for_what_is_no_kind_of_op_is_refused(name: str) -> None:
    """It would be left out in silence, and the step said to take as long as without it."""
    every = Workload(SHAPES, replace(RATES, scale=dict.fromkeys(Kind, 2.0)), 4, 1024, on_cpu=False)
    assert predict(every, PLANS[0]).work_s[Lane.H2D] == pytest.approx(2 * predict(WORK, PLANS[0]).work_s[Lane.H2D])
    wrong = Workload(SHAPES, replace(RATES, scale={"BACKWARD": 1.5, name: 2.0}), 4, 1024, on_cpu=False)
    with pytest.raises(ConfigError, match=rf"rates\.scale\.{name} of the machine is 2, .* one of: FETCH, FETCH_"):
        predict(wrong, PLANS[0])


def test_arithmetic_takes_its_flops_over_the_rate() -> None:
    train, keep = build(PLANS[0], "train", 4, True), build(PLANS[1], "train", 4, True)
    forward = WORK.costs.seconds(op_of(Kind.FORWARD, train))
    products = 2 * sum(t.num_elements for t in SPEC.blocks[0].tensors) * 4096
    assert forward > products / (LINEAR_SHARE * RATES.matmul_flops_per_s)
    whole, kept = (WORK.costs.seconds(op_of(Kind.BACKWARD, s)) for s in (train, keep))
    assert whole - kept == pytest.approx(forward - RATES.op_s, rel=1e-6), "recomputing is one more forward"
    adds = SHAPES.layouts["L000"].num_trainable * ADD_BYTES / RATES.hbm_Bps
    assert kept > 2 * products / (LINEAR_SHARE * RATES.matmul_flops_per_s) + adds


def test_experts_that_all_run_cost_as_many_as_there_are() -> None:
    spec = model_spec(tiny_config("qwen3_moe"))
    block, layouts = spec.blocks[1], {segment.name: layout_of(segment) for segment in spec.segments}
    experts = sum(tensor.num_elements for tensor in block.tensors if len(tensor.shape) == 3)
    all_run = replace(block, traits=replace(block.traits, runs_all_experts=True))
    segments = tuple(all_run if segment is block else segment for segment in spec.segments)

    def expert_flops(of: ModelSpec) -> float:
        shapes = Shapes(of, layouts, 2, 4096, 1024, compiled=True)
        return Workload(shapes, RATES, 4, 1024, on_cpu=False).costs.forward_of(block.name).expert_flops

    assert expert_flops(replace(spec, segments=segments)) == 2 * experts * 4096
    assert 0 < expert_flops(spec) < 2 * experts * 4096


def test_an_update_takes_host_memory_or_hbm() -> None:
    host, device = (op_of(Kind.UPDATE, build(PLANS[i], "train", 4, True)) for i in (0, 2))
    assert (host.lane, device.lane) == (Lane.HOST, Lane.COMPUTE)
    assert WORK.costs.seconds(host) == pytest.approx(RATES.op_s + BLOCK / UPDATE)
    assert WORK.costs.seconds(device) == pytest.approx(RATES.op_s + 28 * BLOCK / RATES.hbm_Bps)
    (use,) = WORK.costs.cost(host).uses
    assert (use.resource, use.yields) == ("dram", True)
    assert use.rate == pytest.approx(28 * UPDATE, rel=0.1)


def test_an_average_is_a_pass_more_over_its_bytes() -> None:
    layouts = {segment.name: layout_of(segment, ("ema",)) for segment in SPEC.segments}
    costs = Workload(replace(SHAPES, layouts=layouts), RATES, 4, 1024, on_cpu=False).costs
    host, device = (op_of(Kind.UPDATE, build(PLANS[i], "train", 4, True)) for i in (0, 2))
    assert costs.seconds(host) == pytest.approx(RATES.op_s + 40 / 28 * BLOCK / UPDATE)
    assert costs.seconds(device) == pytest.approx(RATES.op_s + 40 * BLOCK / RATES.hbm_Bps)


def test_one_table_says_what_a_place_holds_for_costs_and_for_the_arena() -> None:
    slots = slot_bytes(SPEC, PLANS[3], LAYOUTS, 2, 4096)
    assert content_bytes(SHAPES, Place("w", 0), "L000") == slots["w.0"]
    assert content_bytes(SHAPES, Place("g", 1), "L000") == slots["g.1"]
    states = sum(size for name, size in slots.items() if name.startswith("s.1."))
    assert content_bytes(SHAPES, Place("s", 1), "L000") == states
    assert content_bytes(SHAPES, Place("act", 1, 0), "L000") == slots["act.1.0"]
    pools = {place.pool for schedule in schedules() for op in schedule for place in (*op.reads, *op.writes)}
    assert {pool.rpartition(".")[2] for pool in pools} - {"cell"} <= set(CONTENT_BYTES)


def test_a_faster_part_makes_the_lane_that_is_bound_by_it_shorter() -> None:
    slow = predict(WORK, PLANS[0])
    for field, lane in (("h2d_Bps", Lane.H2D), ("d2h_Bps", Lane.D2H), ("update_params_per_s", Lane.HOST)):
        rates = replace(RATES, **{field: 2 * getattr(RATES, field)}, link_both_Bps=1e12, dram_Bps=1e12)
        fast = predict(replace(WORK, rates=rates), PLANS[0])
        assert fast.lanes_s[lane] < 0.8 * slow.lanes_s[lane], field


def test_the_bound_is_named_and_more_rounds_cost_their_traffic() -> None:
    slow_link = replace(RATES, h2d_Bps=1e8, d2h_Bps=1e8, link_both_Bps=2e8)
    bound = predict(replace(WORK, rates=slow_link), PLANS[0])
    assert bound.bound_lane in (Lane.H2D, Lane.D2H)
    assert "link" in bound.bound
    assert 0.5 < bound.bound_share <= 1.0
    many = replace(WORK, num_micro_batches=12)
    times = [predict(many, replace(PLANS[0], round_micro_batches=n)).lanes_s[Lane.H2D] for n in (12, 6, 3, 2, 1)]
    assert times == sorted(times)
    rest = [after / before for before, after in pairwise(times)]
    assert all(1.5 < ratio < 3.5 for ratio in rest), rest


def test_a_use_at_full_speed_is_what_the_op_moves() -> None:
    fetch = op_of(Kind.FETCH, build(PLANS[0], "train", 4, True))
    cost = WORK.costs.cost(fetch)
    assert {use.resource for use in cost.uses} == {"link", "dram"}
    for use in cost.uses:
        assert isinstance(use, Use)
        assert use.rate * cost.seconds == pytest.approx(2 * BLOCK)


def test_rounds_that_are_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds are simulated; all twelve give the same step, lanes and bound."""
    work, rounds = replace(WORK, num_micro_batches=12), replace(PLANS[0], round_micro_batches=1)
    short = predict(work, rounds)
    monkeypatch.setattr("megatrain.planner.prediction.MOST_ROUNDS", 99)
    whole = predict(work, rounds)
    assert len(whole.schedule) > 2 * len(short.schedule)
    assert short.step_s == pytest.approx(whole.step_s, rel=0.01)
    assert short.bound_lane == whole.bound_lane
    for lane, busy_s in whole.lanes_s.items():
        assert short.lanes_s[lane] == pytest.approx(busy_s, rel=0.02, abs=1e-3), lane
    assert short.bound_share == pytest.approx(whole.bound_share, abs=0.03)


def test_kept_attention_saves_its_forward_and_costs_two_copies() -> None:
    plain, kept = (build(plan(activations=way), "train", 4, True) for way in ("recompute", "keep_attention"))
    attended_bytes = 4096 * (512 * 2 + 8 * 4)  # out in bf16, lse in fp32, of 8 heads
    assert SHAPES.attended_bytes["L000"] == attended_bytes
    assert content_bytes(SHAPES, Place("attn", 0, 0), "L000") == attended_bytes
    copies_s = 2 * attended_bytes / RATES.hbm_Bps  # one is read and one written
    attention_s = WORK.costs.forward_of("L000").attention_s
    saved_s = {
        kind: WORK.costs.seconds(op_of(kind, plain)) - WORK.costs.seconds(op_of(kind, kept))
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    scale = {kind: RATES.scale.get(kind, 1.0) for kind in saved_s}
    assert saved_s[Kind.FORWARD] == pytest.approx(-copies_s * scale[Kind.FORWARD])
    assert saved_s[Kind.BACKWARD] == pytest.approx((attention_s - copies_s) * scale[Kind.BACKWARD])

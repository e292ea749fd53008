"""Any plan builds a schedule that passes the check, prints and parses back, and computes the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.errors import PlanError
from megatrain.schedule import (
    Kind,
    Lane,
    Plan,
    Program,
    Run,
    Schedule,
    build,
    check,
    last_calls,
    parse,
    rounds,
    to_text,
)
from megatrain.schedule.ops import TIED_GRAD, Place
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
    plans,
    runs_of,
    sequences,
)
from tests.schedule.symbols import Terms, in_order, reference
from tests.stopwatch import quiet_s

GOLDEN = Path(__file__).parent / "golden"
FLOW_POOLS = ("act", "dact", "call", "kept", "attn")


@given(plans(), sequences(), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_any_plan_builds_what_the_reference_computes(plan: Plan, programs: list[Program], num: int) -> None:
    runs = runs_of(plan, programs, num)
    check(runs, plan)
    for run in runs:
        assert parse(to_text(run.schedule)) == run.schedule
    terms = Terms()
    assert in_order(plan, runs, terms) == reference(plan, runs, terms)


def kinds(schedule: Schedule) -> Counter[str]:
    return Counter(op.kind for op in schedule)


@pytest.mark.parametrize(("num_blocks", "slots"), [(4, 2), (9, 3), (9, 8), (3, 5)])
def test_weights_still_in_a_slot_are_not_fetched_again(num_blocks: int, slots: int) -> None:
    """At the turn of the pass the last `slots` layers are still there; and so are the first ones for the next round."""
    missing = max(0, num_blocks - slots)
    for num_rounds in (1, 2, 3):
        plan = plan_of([STREAMED] * num_blocks, slots=slots, round_micro_batches=1)
        schedule = build(plan, "train", num_rounds, True)
        assert kinds(schedule)[Kind.FETCH] == 2 + num_blocks + missing * (2 * num_rounds - 1)


def test_own_weights_are_fetched_once_and_resident_ones_never() -> None:
    plan = plan_of([OWN_RAM, RESIDENT, OWN_RAM], embed=RESIDENT, tied=True, round_micro_batches=1)
    fetched = [op.segment for op in build(plan, "train", 3, True) if op.kind is Kind.FETCH]
    assert fetched == ["L000", "L002", "HEAD"]


def test_gradients_rotate_through_their_slots_unless_all_fit() -> None:
    tight = kinds(build(plan_of([STREAMED] * 3, grad_slots=2, round_micro_batches=1), "train", 3, False))
    roomy = kinds(build(plan_of([STREAMED] * 3, grad_slots=3, round_micro_batches=1), "train", 3, False))
    assert (tight[Kind.FETCH_GRAD], tight[Kind.DRAIN]) == (6, 3 * 3 + 2)
    assert (roomy[Kind.FETCH_GRAD], roomy[Kind.DRAIN]) == (0, 3 + 2)
    assert tight[Kind.ZERO] == roomy[Kind.ZERO] == 5


def test_nothing_flows_back_below_the_lowest_trainable_segment() -> None:
    plan = plan_of([STREAMED] * 4, frozen=["EMBED", "L000", "L002"], keep=["L000", "L002"])
    schedule = build(plan, "train", 2, False)
    backward = {op.segment for op in schedule if op.kind is Kind.BACKWARD}
    assert backward == {"L001", "L002", "L003"}
    assert kinds(schedule)[Kind.EMBED_BACKWARD] == 0
    assert {op.segment for op in schedule if op.kind in (Kind.ZERO, Kind.NORM, Kind.DRAIN)} == {"L001", "L003", "HEAD"}
    assert {op.segment for op in schedule for p in op.writes if p.pool == "kept"} == {"L002"}


def test_a_tied_embedding_is_merged_once_and_measured_after() -> None:
    schedule = build(plan_of(tied=True, round_micro_batches=1), "train", 3, False)
    of_embed = [op.kind for op in schedule if op.segment == "EMBED" and op.kind in (Kind.MERGE, Kind.NORM, Kind.DRAIN)]
    assert of_embed == [Kind.MERGE, Kind.NORM, Kind.DRAIN]
    frozen = build(plan_of(tied=True, frozen=["EMBED"]), "train", 2, False)
    assert not any(p.pool == "tied.grad" for op in frozen for p in op.writes)


def test_a_frozen_tied_embedding_beside_trained_tensors_has_no_sum_of_its_own() -> None:
    plan = replace(plan_of(tied=True), embedding_trainable=False)
    runs = runs_of(plan, ["train", "train"])
    check(runs, plan)
    ops = runs[0].schedule
    assert [op for op in ops if op.kind == Kind.MERGE or TIED_GRAD in op.writes] == []
    assert [op.segment for op in ops if op.kind == Kind.EMBED_BACKWARD] == ["EMBED"] * 2


def test_updates_are_the_prologue_of_whatever_comes_next() -> None:
    plan = plan_of([STREAMED, RESIDENT, STREAMED], frozen=["L002"])
    for program in ("train", "eval", "flush", "save"):
        schedule = build(plan, program, 1, True)
        updates = [(op.segment, op.lane) for op in schedule if op.kind is Kind.UPDATE]
        assert sorted(updates) == [("EMBED", "host"), ("HEAD", "host"), ("L000", "host"), ("L001", "compute")]
        assert kinds(build(plan, program, 1, False))[Kind.UPDATE] == 0
    compute = [(op.kind, op.segment) for op in build(plan, "train", 1, True) if op.lane is Lane.COMPUTE]
    before_first_use = compute.index((Kind.FORWARD, "L001")) - 1
    assert compute.index((Kind.UPDATE, "L001")) == before_first_use


def lines(schedule: Schedule, segment: str) -> list[str]:
    """Kind and lane of the ops of a segment whose order is about its update."""
    kinds = (Kind.FETCH, Kind.FETCH_STATE, Kind.FETCH_GRAD, Kind.DRAIN, Kind.UPDATE, Kind.STORE, Kind.SAVE)
    kinds += (Kind.STORE_STATE,)
    return [f"{op.kind} @{op.lane}" for op in schedule if op.segment == segment and op.kind in kinds]


def test_state_passes_through_the_device_in_a_step_and_stays_at_home_in_all_else() -> None:
    plan = plan_of([STREAMED, DEVICE, STREAMED, STREAMED], embed=OWN_DEVICE)
    passes = ["FETCH @h2d", "FETCH_STATE @h2d", "FETCH_GRAD @h2d", "UPDATE @compute", "STORE @d2h", "STORE_STATE @d2h"]
    for segment in ("EMBED", "L001"):
        again = ["FETCH @h2d"] * (segment == "L001")  # in the backward pass: two of four are still in their slots
        assert lines(build(plan, "train", 3, False), segment) == ["FETCH @h2d", *again, "DRAIN @d2h"]
        assert lines(build(plan, "train", 3, True), segment) == [*passes, *again, "DRAIN @d2h"]
        assert lines(build(plan, "eval", 3, True), segment) == ["UPDATE @host", "FETCH @h2d"]
        assert lines(build(plan, "eval", 3, False), segment) == ["FETCH @h2d"]
        assert lines(build(plan, "flush", 0, True), segment) == ["UPDATE @host"]
        assert lines(build(plan, "save", 0, True), segment) == ["UPDATE @host", "SAVE @disk"]
    frozen = build(plan_of([STREAMED, DEVICE], frozen=["L001"]), "train", 1, True)
    assert lines(frozen, "L001") == ["FETCH @h2d"]


def test_states_that_pass_take_their_slots_in_turn() -> None:
    """Each is fetched a visit after the update before it in its slots, and its weights are updated where they are."""
    plan = plan_of([DEVICE] * 5, slots=2, grad_slots=3, state_slots=2)
    schedule = build(plan, "train", 1, True)
    updates = [op for op in schedule if op.kind is Kind.UPDATE and op.lane is Lane.COMPUTE]
    assert [op.segment for op in updates] == ["L000", "L001", "L002", "L003", "L004"]
    assert [str(op.reads[2]) for op in updates] == ["s.0", "s.1", "s.0", "s.1", "s.0"]
    assert [str(op.reads[0]) for op in updates] == ["g.0", "g.1", "g.2", "g.0", "g.1"]
    forwards = {op.segment: op for op in schedule if op.kind is Kind.FORWARD}
    assert [op.reads[3] for op in updates] == [forwards[op.segment].reads[0] for op in updates]
    listed = [(op.kind, op.segment) for op in schedule]
    for segment, behind in (("L002", "L001"), ("L003", "L002"), ("L004", "L003")):
        between = listed[listed.index((Kind.FORWARD, behind)) : listed.index((Kind.FETCH_STATE, segment))]
        assert {kind for kind, _ in between} <= {Kind.FORWARD, Kind.FETCH}
    early = listed[: listed.index((Kind.EMBED, "EMBED"))]
    assert (Kind.FETCH_STATE, "L001") in early
    assert (Kind.FETCH_STATE, "L002") not in early


def test_save_reads_homes_on_the_disk_lane() -> None:
    plan = plan_of([STREAMED, RESIDENT], frozen=["HEAD"])
    saves = {op.segment: ",".join(map(str, op.reads)) for op in build(plan, "save", 0, True) if op.lane is Lane.DISK}
    assert saves == {
        "EMBED": "ram.w.EMBED,ram.state.EMBED",
        "L000": "ram.w.L000,ram.state.L000",
        "L001": "w.L001,hbm.state.L001",
        "HEAD": "ram.w.HEAD",
    }
    assert build(plan, "flush", 0, False) == ()


def test_from_disk_state_comes_once_and_weights_twice_a_step_and_each_goes_back_once() -> None:
    plan = plan_of([{**STREAMED, **DISK}] * 6, embed={**OWN_RAM, **DISK}, head={**OWN_RAM, **DISK}, disk_slots=2)
    schedule = build(plan, "train", 2, True)
    for segment in plan.blocks[:4]:
        moved = [op.kind for op in schedule if op.segment == segment.name and op.lane in (Lane.DISK, Lane.DISK_READ)]
        assert moved == [Kind.LOAD_STATE, Kind.LOAD, Kind.SPILL, Kind.LOAD], "fetched from where it was updated"
    for segment in plan.segments[-3:]:  # still in a slot at the turn
        moved = [op.kind for op in schedule if op.segment == segment.name and op.lane in (Lane.DISK, Lane.DISK_READ)]
        assert moved == [Kind.LOAD_STATE, Kind.LOAD, Kind.SPILL]


def test_two_passes_go_forward_once_and_backward_twice_and_use_every_gradient_up_at_once() -> None:
    plan = plan_of([STREAMED, RESIDENT_POOLED, STREAMED], two_pass=True, keep=["L002"])
    schedule = build(plan, "train", 2, True)
    count = Counter(op.kind for op in schedule)
    assert (count[Kind.FORWARD], count[Kind.BACKWARD], count[Kind.HEAD]) == (6, 12, 4)
    clip = next(index for index, op in enumerate(schedule) if op.kind is Kind.CLIP)
    first, second = schedule[:clip], schedule[clip:]
    assert not {Kind.DRAIN, Kind.UPDATE} & {op.kind for op in first}
    assert Kind.NORM not in {op.kind for op in second}
    assert [op.segment for op in second if op.kind is Kind.UPDATE] == ["HEAD", "L002", "L001", "L000", "EMBED"]
    graphs = [any(place.pool == "kept" for place in op.reads) for op in schedule if op.kind is Kind.BACKWARD]
    assert graphs == [True, True] + 10 * [False], "a graph serves one backward"
    assert all(place.pool != "loss" for op in second for place in op.writes), "CLIP may still read it"


def test_two_passes_leave_the_last_states_to_the_next_program_whatever_it_is() -> None:
    plan = plan_of([{**STREAMED, **DISK_STATE}] * 5, two_pass=True, disk_slots=2)
    assert plan.spilled_late == (("L000", 0), ("L001", 1))
    for program in ("train", "eval", "save", "flush"):
        disk = [(op.kind, op.segment) for op in build(plan, program, 2, True) if op.lane is Lane.DISK]
        assert disk[:2] == [(Kind.SPILL, "L000"), (Kind.SPILL, "L001")]
        assert (Kind.SPILL, "L000") not in [(op.kind, op.segment) for op in build(plan, program, 2, False)]
    step = build(plan, "train", 2, True)
    clip = next(index for index, op in enumerate(step) if op.kind is Kind.CLIP)
    waits = {op.segment: op.waits for op in step[clip:] if op.kind is Kind.LOAD_STATE}
    late = {op.records for op in step[:clip] if op.kind is Kind.SPILL}
    assert set(waits["L004"] + waits["L003"]) == late, "the first loads wait for no more, so they run in the first pass"
    moved = Counter((op.kind, op.segment) for op in step if op.lane in (Lane.DISK, Lane.DISK_READ))
    assert moved == Counter((kind, s.name) for s in plan.blocks for kind in (Kind.LOAD_STATE, Kind.SPILL))


@pytest.mark.parametrize(
    ("num_on_disk", "disk_slots", "late"),
    [(2, 2, []), (3, 2, ["L000"]), (4, 2, ["L000", "L001"]), (5, 3, ["L000", "L001"]), (2, 1, ["L000"])],
)
def test_a_state_whose_slot_nothing_else_takes_is_not_left_in_it(
    num_on_disk: int, disk_slots: int, late: list[str]
) -> None:
    plan = plan_of([{**STREAMED, **DISK_STATE}] * num_on_disk, two_pass=True, disk_slots=disk_slots)
    assert sorted(name for name, _ in plan.spilled_late) == late
    assert replace(plan, clip_mode="deferred").spilled_late == ()
    check(runs_of(plan, ["train", "train", "eval", "train", "save", "train", "train", "flush"]), plan)


@pytest.mark.parametrize(("num", "slots", "waiting"), [(2, 2, 0), (3, 2, 2), (4, 2, 4), (5, 2, 5), (4, 3, 2)])
def test_a_second_pass_brings_back_all_inputs_that_share_a_slot(num: int, slots: int, waiting: int) -> None:
    names = [f"L{i:03d}" for i in range(num)]
    plan = plan_of([STREAMED] * num, offload=names, act_slots=slots, two_pass=True)
    assert len(plan.waiting_in_ram) == waiting
    kinds = Counter(op.kind for op in build(plan, "train", 1, False))
    assert kinds[Kind.OFFLOAD] == waiting
    assert kinds[Kind.RELOAD] == max(0, num - slots) + waiting


def test_what_is_on_disk_is_saved_from_where_it_was_updated() -> None:
    plan = plan_of([{**STREAMED, **DISK_STATE}, {**STREAMED, **DISK}], frozen=["HEAD"], head={**OWN_RAM, **DISK})
    for pending in (True, False):
        schedule = build(plan, "save", 0, pending)
        loads = [(op.kind, op.segment) for op in schedule if op.lane is Lane.DISK_READ]
        wanted = {(Kind.LOAD_STATE, "L000"), (Kind.LOAD, "L001"), (Kind.LOAD_STATE, "L001"), (Kind.LOAD, "HEAD")}
        assert set(loads) == wanted
        assert len(loads) == 4
        saves = {op.segment: ",".join(map(str, op.reads)) for op in schedule if op.kind is Kind.SAVE}
        assert saves["L000"] == "ram.w.L000,land.state.0"
        assert saves["L001"] == "land.w.0,land.state.1"
        assert saves["HEAD"] == "land.w.1"


@pytest.mark.parametrize(("num", "most", "sizes"), [(1, 9, [1]), (5, 4, [2, 3]), (8, 4, [4, 4]), (7, 3, [2, 2, 3])])
def test_rounds_are_few_and_nearly_equal(num: int, most: int, sizes: list[int]) -> None:
    parts = rounds(num, most)
    assert [len(part) for part in parts] == sizes
    assert [m for part in parts for m in part] == list(range(num))


def test_a_wholly_frozen_model_can_be_evaluated_but_not_trained() -> None:
    plan = plan_of([STREAMED], frozen=["EMBED", "L000", "HEAD"])
    check(runs_of(plan, ["eval", "save"]), plan)
    with pytest.raises(PlanError, match="nothing to train"):
        build(plan, "train", 1, False)


@pytest.mark.parametrize(
    ("name", "plan", "num"),
    [
        ("streamed", plan_of([STREAMED] * 3), 2),
        ("state_streamed", plan_of([DEVICE, STREAMED, STREAMED], embed=OWN_DEVICE), 1),
        ("disk", plan_of([STREAMED, {**STREAMED, **DISK_STATE}, {**STREAMED, **DISK}], head={**OWN_RAM, **DISK}), 1),
        ("tied_two_rounds", plan_of([STREAMED] * 3, tied=True, embed=RESIDENT, round_micro_batches=1), 2),
        ("offload", plan_of([STREAMED] * 4, offload=["L000", "L001", "L002", "L003"]), 1),
        ("keep_attention", plan_of([STREAMED] * 3, keep_attention=["L001", "L002"]), 2),
        ("second_pass", plan_of([STREAMED, RESIDENT_POOLED, STREAMED], two_pass=True), 1),
        ("second_pass_disk", plan_of([{**STREAMED, **DISK_STATE}, STREAMED] * 2, two_pass=True, disk_slots=1), 1),
    ],
)
def test_golden(name: str, plan: Plan, num: int) -> None:
    """A change of order is a change of this file: on purpose, and read by someone."""
    assert to_text(build(plan, "train", num, True)) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def peak(schedule: Schedule) -> Mapping[str, int]:
    """The most places of each flow pool (act, dact, call, kept, attn) that are alive during one op."""
    last = {place: index for index, op in enumerate(schedule) for place in (*op.reads, *op.writes)}
    alive: Counter[str] = Counter()
    most: dict[str, int] = dict.fromkeys(FLOW_POOLS, 0)
    born: set[Place] = set()
    for index, op in enumerate(schedule):
        for place in op.writes:
            if place.pool in FLOW_POOLS and place not in born:
                born.add(place)
                alive[place.pool] += 1
                most[place.pool] = max(most[place.pool], alive[place.pool])
        alive.subtract(place.pool for place in born if last[place] == index)
    return most


def test_peak_and_liveness() -> None:
    plan = plan_of([STREAMED] * 4, keep=["L003"], keep_attention=["L001", "L002"], round_micro_batches=2)
    schedule = build(plan, "train", 4, False)
    # Boundary activations of one round, 2 micro-batches: inputs of 4 blocks and of HEAD. A new round starts empty.
    assert peak(schedule) == {"act": 2 * 5, "dact": 2, "call": 2, "kept": 2, "attn": 4}
    evaluation = build(plan_of([STREAMED] * 4), "eval", 2, False)
    assert peak(evaluation) == {"act": 3, "dact": 0, "call": 2, "kept": 0, "attn": 0}
    dead = [index for index, op in enumerate(schedule) if id(op) in last_calls(schedule)]
    assert sorted(schedule[index].micro_batch for index in dead) == [0, 1, 2, 3]
    for index in dead:
        call = Place("call", "", schedule[index].micro_batch)
        assert call in schedule[index].reads
        assert all(call not in (*op.reads, *op.writes) for op in schedule[index + 1 :])


def test_a_hundred_and_eighty_layers_build_and_check_quickly() -> None:
    plan = plan_of([STREAMED] * 180, tied=True, round_micro_batches=8)
    schedule, first = build(plan, "train", 16, True), build(plan, "train", 16, False)
    assert quiet_s(lambda: build(plan, "train", 16, True), limit_s=0.5) < 0.5
    assert quiet_s(lambda: check([Run("train", first, 16), Run("train", schedule, 16)], plan), limit_s=2.0) < 2.0

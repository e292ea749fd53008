"""The checker says what is wrong, and where; faults across programs are found too. Single faults: test_mutants."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.schedule import Kind, Lane, Place, Plan, Program, Run, ScheduleError, build, check, parse
from megatrain.schedule.waits import with_waits
from tests.schedule.plans import DEVICE, DISK, OWN_DEVICE, RESIDENT, STREAMED, plan_of, runs_of

PLAN = plan_of([STREAMED, RESIDENT, STREAMED], round_micro_batches=1)


def refusal(runs: list[Run], plan: Plan = PLAN) -> str:
    with pytest.raises(ScheduleError) as error:
        check(runs, plan)
    return str(error.value)


def changed(run: Run, index: int, **fields: object) -> Run:
    schedule = run.schedule
    return run._replace(schedule=(*schedule[:index], replace(schedule[index], **fields), *schedule[index + 1 :]))


@pytest.mark.parametrize(
    "programs",
    [
        ["train", "eval", "save", "train", "flush"],
        ["train", "train", "train"],  # also step, skip, step: a skip is in the cell, not in the schedule
        ["eval", "save", "flush", "train", "save", "eval"],
        ["flush", "flush"],
    ],
)
def test_sequences_pass(programs: list[Program]) -> None:
    resident = plan_of([RESIDENT] * 2, embed=RESIDENT, head=RESIDENT)
    device = plan_of([DEVICE, STREAMED, DEVICE], embed=OWN_DEVICE, state_slots=1)
    disk = plan_of([{**STREAMED, **DISK}, STREAMED], disk_slots=1)
    for plan in (PLAN, plan_of(tied=True, slots=3), resident, device, disk):
        check(runs_of(plan, programs), plan)


def test_the_message_points_at_the_op() -> None:
    runs = runs_of(plan_of(), ["train", "train"])
    index = next(i for i, op in enumerate(runs[1].schedule) if (op.kind, op.segment) == (Kind.FORWARD, "L002"))
    op = runs[1].schedule[index]
    text = refusal([runs[0], changed(runs[1], index, reads=(Place("w", 1), *op.reads[1:]))], plan_of())
    reason = "reads w.1 which holds weights of L003 after step 1, wants weights of L002 after step 1"
    assert text.startswith(f"program 2 (train), op {index}: {reason}\n")
    pointed = [line for line in text.splitlines() if "<-- HERE" in line]
    assert len(pointed) == 1
    assert pointed[0].split()[:3] == [str(index), "FORWARD", "L002"]


def test_a_forgotten_pending_update_is_found() -> None:
    first = runs_of(PLAN, ["train"])
    for program in ("train", "eval", "save", "flush"):
        assert "after step 0" in refusal([*first, Run(program, build(PLAN, program, 2, False), 2)])


def test_an_update_that_is_not_due_is_found() -> None:
    for program in ("train", "eval", "save", "flush"):
        assert "UPDATE" in refusal([Run(program, build(PLAN, program, 2, True), 2)])
    twice = [*runs_of(PLAN, ["train", "eval"]), Run("eval", build(PLAN, "eval", 2, True), 2)]
    assert "UPDATE" in refusal(twice)


def test_programs_of_another_length_are_found() -> None:
    run = Run("train", build(PLAN, "train", 2, False), 3)
    assert "sum of 2 micro-batches, wants" in refusal([run])
    assert "has micro-batch 1 of 1" in refusal([run._replace(num_micro_batches=1)])
    assert "LOSS has no place in train" in refusal([Run("train", build(PLAN, "eval", 1, False), 1)])


def test_tokens() -> None:
    run = runs_of(plan_of(), ["train"])[0]
    waiting = next(i for i, op in enumerate(run.schedule) if op.waits)
    recording = [i for i, op in enumerate(run.schedule) if op.records]
    plan = plan_of()
    assert "waits for nobody, which no earlier op records" in refusal([changed(run, waiting, waits=("nobody",))], plan)
    late = run.schedule[recording[-1]].records
    assert f"waits for {late}, which no earlier op records" in refusal([changed(run, waiting, waits=(late,))], plan)
    again = run.schedule[recording[0]].records
    assert f"records {again}, which another op" in refusal([changed(run, recording[1], records=again)], plan)


def test_a_race_names_both_ops() -> None:
    run = runs_of(plan_of(), ["train"])[0]
    index = next(i for i, op in enumerate(run.schedule) if (op.kind, op.segment) == (Kind.FORWARD, "L002"))
    text = refusal([changed(run, index, waits=())], plan_of())
    assert "races on w.0 with op" in text
    assert "(FETCH L002 @h2d): no wait orders them" in text


def test_lanes_and_slots_are_those_of_the_plan() -> None:
    run = runs_of(PLAN, ["train"])[0]
    kinds = [op.kind for op in run.schedule]
    for kind, lane in [(Kind.FETCH, Lane.D2H), (Kind.NORM, Lane.HOST), (Kind.CLIP, Lane.COMPUTE)]:
        assert "lane" in refusal([changed(run, kinds.index(kind), lane=lane)])
    beyond = Place("w", PLAN.weight_slots)
    fetch = next(i for i, op in enumerate(run.schedule) if op.kind is Kind.FETCH and op.segment == "L000")
    assert "which the plan does not give" in refusal([changed(run, fetch, writes=(beyond,))])
    assert "reads 0 places, must read 1" in refusal([changed(run, fetch, reads=())])
    assert "the plan has no segment 'L009'" in refusal([changed(run, fetch, segment="L009")])
    assert "is no op of block segments" in refusal([changed(run, kinds.index(Kind.HEAD), segment="L001")])


def test_work_in_vain_is_found() -> None:
    plan = plan_of()
    run = runs_of(plan, ["eval"])[0]
    fetch = next(op for op in run.schedule if (op.kind, op.segment) == (Kind.FETCH, "L003"))
    again = run._replace(schedule=with_waits((*run.schedule, fetch)))
    assert f"is in vain: {fetch.writes[0]} already so" in refusal([again], plan)
    other = replace(fetch, writes=(Place("w", 1 - fetch.writes[0].key),))
    useless = run._replace(schedule=with_waits((*run.schedule, other)))
    assert f"writes {other.writes[0]}, which nothing reads" in refusal([useless], plan)
    overwritten = run._replace(schedule=with_waits((other, *run.schedule)))
    assert f"overwrites {other.writes[0]}, which op 0 wrote and nothing has read" in refusal([overwritten], plan)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("FETCH L001 @h2d r:ram.w.L001 w:w.L001", "the weights of L001 never leave HBM"),
        ("DRAIN L001 @d2h r:g.L001 w:ram.grad.L001", "the gradient of L001 never leaves HBM"),
        ("FETCH_STATE L000 @h2d r:ram.state.L000 w:s.L000", "the state of L000 never leaves its home"),
        ("FETCH_STATE L002 @h2d r:ram.state.L002 w:s.L002", "L002 is frozen"),
        ("STORE L000 @d2h r:w.0 w:ram.w.L000", "L000 is updated in its home"),
        ("STORE_STATE L000 @d2h r:s.0 w:ram.state.L000", "the state of L000 never leaves its home"),
        ("ZERO L002 @compute w:g.0", "L002 is frozen"),
        ("UPDATE L002 @host r:ram.grad.L002,cell,ram.state.L002,ram.w.L002 w:ram.state.L002,ram.w.L002", "is frozen"),
        ("NORM L000 m0 @compute r:g.0 w:norm.L000", "NORM is for all of them"),
        ("FORWARD L000 @compute r:w.0,act.0.0,call.0 w:act.1.0", "has micro-batch None of 1"),
        ("MERGE EMBED @compute r:tied.grad,g.EMBED w:g.EMBED", "there is no tied gradient"),
        ("CLIP L000 @host r:norm.EMBED w:cell", "CLIP is one op on the host lane"),
        ("CLIP - @host r:norm.EMBED w:cell", "reads 1 places, must read 5"),
        ("SAVE L000 @disk r:ram.w.L000,ram.state.L000 w:file.L000", "SAVE has no place in train"),
    ],
)
def test_ops_that_mean_nothing_here_are_found(line: str, complaint: str) -> None:
    plan = plan_of([STREAMED, RESIDENT, STREAMED], head=OWN_DEVICE, frozen=["L002"])
    run = runs_of(plan, ["train"], 1)[0]
    assert complaint in refusal([run._replace(schedule=(*run.schedule, *parse(line)))], plan)


def test_backward_below_what_is_trained_is_found() -> None:
    plan = plan_of([STREAMED] * 2, frozen=["EMBED", "L000"], slots=2)
    run = runs_of(plan, ["train"], 1)[0]
    above = next(op for op in run.schedule if (op.kind, op.segment) == (Kind.BACKWARD, "L001"))
    dact = Place("dact", "", 0)
    reads = (Place("w", 0), Place("act", 0, 0), Place("call", "", 0), dact)
    below = replace(above, segment="L000", reads=reads, writes=(dact,))
    text = refusal([run._replace(schedule=with_waits((*run.schedule, below)))], plan)
    assert "nothing at or below L000 is trained" in text


def test_what_is_in_slots_does_not_outlive_a_program() -> None:
    """The second eval could find L000 and L001 where the first left them; it must not rely on it."""
    plan = plan_of([STREAMED] * 2)
    runs = runs_of(plan, ["eval", "eval"])
    thrifty = [op for op in runs[1].schedule if (op.kind, op.segment) != (Kind.FETCH, "L000")]
    text = refusal([runs[0], runs[1]._replace(schedule=with_waits(thrifty))], plan)
    assert "reads w.0 which holds nothing, wants weights of L000 after step 0" in text


PASSING = plan_of([DEVICE, STREAMED, DEVICE])


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Kind.FETCH_STATE, "reads s.0 which holds nothing, wants state of L000 after step 0"),
        (Kind.FETCH_GRAD, "reads g.0 which holds nothing, wants gradient of L000, step 1"),
        (Kind.UPDATE, "reads w.0 which holds weights of L000 after step 0, wants weights of L000 after step 1"),
        (Kind.STORE, "reads w.0 which holds weights of L000 after step 0, wants weights of L000 after step 1"),
    ],
)
def test_what_a_passing_update_cannot_do_without_is_missed(kind: Kind, complaint: str) -> None:
    first, second = runs_of(PASSING, ["train", "train"])
    check([first, second], PASSING)
    ops = [op for op in second.schedule if (op.kind, op.segment) != (kind, "L000")]
    assert complaint in refusal([first, second._replace(schedule=with_waits(ops))], PASSING)


def test_a_passing_state_that_is_not_stored_in_the_end_is_missed() -> None:
    first, second = runs_of(PASSING, ["train", "train"])
    ops = [op for op in second.schedule if (op.kind, op.segment) != (Kind.STORE_STATE, "L002")]
    text = refusal([first, second._replace(schedule=with_waits(ops))], PASSING)
    assert "ram.state.L002 is left with state of L002 after step 0, must be left with" in text


def test_a_state_passes_in_a_step_alone() -> None:
    """Every other program updates where the state lives."""
    step = runs_of(PASSING, ["train", "train"])[1].schedule
    (fetch,) = (op for op in step if (op.kind, op.segment) == (Kind.FETCH_STATE, "L000"))
    programs: list[Program] = ["flush", "save", "eval"]
    for program in programs:
        first, second = runs_of(PASSING, ["train", program])
        check([first, second], PASSING)
        moved = second._replace(schedule=with_waits([fetch, *second.schedule]))
        assert f"FETCH_STATE has no place in {program}" in refusal([first, moved], PASSING)

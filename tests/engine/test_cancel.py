"""A step that breaks or is interrupted, at every op of a whole step: it ends, it says why, nothing runs on bad data."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from megatrain.engine.executor import Executor
from megatrain.engine.lanes import lane_devices
from megatrain.schedule import Kind, Lane, Op, Plan, Schedule
from tests.schedule.plans import DEVICE, DISK, DISK_STATE, OWN_DEVICE, RESIDENT, STREAMED, plan_of, runs_of

PLANS = {
    "tied, frozen between": plan_of([STREAMED] * 3, tied=True, frozen=["L001"]),
    "three homes, two rounds": plan_of(
        [STREAMED, DEVICE, RESIDENT], embed=OWN_DEVICE, tied=True, round_micro_batches=1
    ),
    "on disk, inputs in RAM": plan_of(
        [{**STREAMED, **DISK}, STREAMED, STREAMED], offload=["L000", "L001", "L002"], disk_slots=1
    ),
    "two passes": plan_of([STREAMED, {**STREAMED, **DISK_STATE}], two_pass=True),
}


class Broken(BaseException):
    """Not an Exception: what Ctrl-C and a dying worker raise is caught by no accident."""


def depending(schedule: Schedule, index: int) -> set[int]:
    """Ops that may only start once op `index` is done: by lane order and by waits."""
    found = {index}
    for later in range(index + 1, len(schedule)):
        op = schedule[later]
        records = {schedule[i].records for i in found} - {None}
        if any(schedule[i].lane == op.lane for i in found) or records & set(op.waits):
            found.add(later)
    return found - {index}


def broken_at(schedule: Schedule, index: int) -> set[int]:
    """The ops that had run when `run` came back with the error of op `index`."""
    number = {id(op): i for i, op in enumerate(schedule)}
    done: set[int] = set()

    def handle(op: Op) -> None:
        if number[id(op)] == index:
            raise Broken(index)
        done.add(number[id(op)])

    executor = Executor(lane_devices(torch.device("cpu")), dict.fromkeys(Kind, handle))
    try:
        with pytest.raises(Broken) as error:
            executor.run(schedule)
        assert error.value.args == (index,)
    finally:
        executor.close()
    return done


def schedules(plan: Plan) -> Iterator[Schedule]:
    for run in runs_of(plan, ["train", "train", "save"])[1:]:
        yield run.schedule


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_break_at_any_op_ends_the_program_and_runs_nothing_behind_it(plan: Plan) -> None:
    before = set(threading.enumerate())
    num_behind = 0
    for schedule in schedules(plan):
        for index in range(len(schedule)):
            behind = depending(schedule, index)
            num_behind += len(behind)
            ran = broken_at(schedule, index)
            assert not ran & behind, f"{schedule[index]} broke, yet {[schedule[i] for i in sorted(ran & behind)]} ran"
    assert num_behind > 500
    assert set(threading.enumerate()) == before


def test_what_depends_on_an_op_is_found() -> None:
    (schedule, _) = schedules(PLANS["tied, frozen between"])
    clip = next(i for i, op in enumerate(schedule) if op.kind == Kind.CLIP)
    first = next(i for i, op in enumerate(schedule) if op.lane == Lane.COMPUTE)
    assert clip in depending(schedule, first)
    assert depending(schedule, clip) == set()


class Hangs(BaseException):
    """The alarm came a second time: nothing had come of the first one."""


def interrupted(executor: Executor, schedule: Schedule, after_s: float) -> bool:
    """Whether Ctrl-C came in a step, `after_s` behind its start; Hangs if the step then does not end in seconds."""
    alarms: list[object] = []
    running = True

    def ring(*_: object) -> None:
        if running:  # a lane's thread may take the signal, and the main one hear of it after the timer was stopped
            alarms.append(None)
            raise KeyboardInterrupt if len(alarms) == 1 else Hangs

    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s, 10.0)
        executor.run(schedule)
        running = False
    except KeyboardInterrupt:
        running = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    return bool(alarms)


@pytest.mark.timeout(0)  # the alarm is this test's own
def test_ctrl_c_at_any_moment_leaves_nobody_waiting() -> None:
    """Some hundreds at random moments; the lanes then take the next step, so one left waiting shows there."""
    (schedule, _) = schedules(PLANS["three homes, two rounds"])
    executor = Executor(lane_devices(torch.device("cpu")), dict.fromkeys(Kind, lambda _: None))
    dice, num_interrupts, usual = random.Random(0), 0, signal.getsignal(signal.SIGALRM)
    gc.disable()  # what an interrupt meets inside a collector's callback is lost
    try:
        started_s = time.perf_counter()
        for _ in range(20):
            executor.run(schedule)
        step_s = (time.perf_counter() - started_s) / 20
        while time.perf_counter() < started_s + 5.0:
            num_interrupts += interrupted(executor, schedule, dice.random() * step_s)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
        gc.enable()
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive(), "a lane waits for what will never come"
    assert num_interrupts > 200

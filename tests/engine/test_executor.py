"""The executor: order, waits, errors. No model."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from megatrain.engine.chaos import last_reads
from megatrain.engine.executor import Executor
from megatrain.engine.lanes import lane_devices
from megatrain.schedule.ops import Kind, Lane, Op, Place

W0, G0, ACT = Place("w", 0), Place("g", 0), Place("act", 0, 0)


def op(kind: Kind, lane: Lane, waits: tuple[str, ...] = (), records: str | None = None) -> Op:
    return Op(kind, "L000", None, lane, (), (), waits, records)


def run(ops, handlers):
    executor = Executor(lane_devices(torch.device("cpu")), handlers)
    try:
        return executor.run(tuple(ops))
    finally:
        executor.close()


def test_a_wait_is_kept_across_lanes():
    seen = []

    def slow(_op: Op) -> None:
        time.sleep(0.05)
        seen.append("fetched")

    ops = [op(Kind.FETCH, Lane.H2D, records="f1"), op(Kind.FORWARD, Lane.COMPUTE, waits=("f1",))]
    run(ops, {Kind.FETCH: slow, Kind.FORWARD: lambda _: seen.append("forward")})
    assert seen == ["fetched", "forward"]


def test_a_slow_update_of_a_late_layer_does_not_delay_an_early_forward():
    update_may_end, forward_done = threading.Event(), threading.Event()

    def update(_op: Op) -> None:
        assert update_may_end.wait(60)

    def forward(_op: Op) -> None:
        forward_done.set()
        update_may_end.set()  # only a forward that did not wait for the update can let it end

    ops = [op(Kind.UPDATE, Lane.HOST, records="u"), op(Kind.FORWARD, Lane.COMPUTE), op(Kind.FETCH, Lane.H2D, ("u",))]
    run(ops, {Kind.UPDATE: update, Kind.FORWARD: forward, Kind.FETCH: lambda _: None})
    assert forward_done.is_set()


def test_an_error_on_any_lane_reaches_the_caller_and_nothing_hangs():
    def broken(_op: Op) -> None:
        raise RuntimeError("lane broke")

    ops = [op(Kind.UPDATE, Lane.HOST, records="u"), op(Kind.FETCH, Lane.H2D, waits=("u",), records="f")]
    ops.append(op(Kind.FORWARD, Lane.COMPUTE, waits=("f",)))
    forwards = []
    started = time.perf_counter()
    with pytest.raises(RuntimeError, match="lane broke"):
        run(ops, {Kind.UPDATE: broken, Kind.FETCH: lambda _: None, Kind.FORWARD: forwards.append})
    assert time.perf_counter() - started < 60
    assert forwards == []


class Queue:
    """A lane as a stream is: what an op leaves in `queued` happens when the lane drains."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.happened: list[str] = []

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> float:
        return 0.0

    def wait(self, _mark: object) -> None:
        return None

    def drain(self) -> None:
        self.happened += self.queued
        self.queued.clear()


@pytest.mark.parametrize("lane", [Lane.COMPUTE, Lane.D2H])
def test_what_a_lane_queued_before_its_error_has_happened_when_the_error_comes(lane: Lane):
    """Else its copies would go on while the caller gives their memory back."""
    queue = Queue()

    def drain(op: Op) -> None:
        if op.records is None:
            raise RuntimeError("lane broke")
        queue.queued.append(op.records)

    executor = Executor({**lane_devices(torch.device("cpu")), lane: queue}, {Kind.DRAIN: drain})
    with pytest.raises(RuntimeError, match="lane broke"):
        executor.run((op(Kind.DRAIN, lane, records="d0"), op(Kind.DRAIN, lane)))
    assert queue.happened == ["d0"]
    executor.close()


@pytest.mark.timeout(20)
def test_an_interrupt_between_two_ops_leaves_no_lane_waiting():
    class Interrupted(Queue):
        def context(self) -> AbstractContextManager[object]:
            raise KeyboardInterrupt

    ran = []
    lanes = {**lane_devices(torch.device("cpu")), Lane.COMPUTE: Interrupted()}
    executor = Executor(lanes, {Kind.FORWARD: ran.append, Kind.DRAIN: ran.append})
    with pytest.raises(KeyboardInterrupt):
        executor.run((op(Kind.FORWARD, Lane.COMPUTE, records="f"), op(Kind.DRAIN, Lane.D2H, waits=("f",))))
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive(), "the lane waits for an op that will never be issued"
    assert ran == []


def test_after_an_error_a_lane_begins_nothing_more_though_it_waits_for_nothing():
    begun, broken, ran = threading.Event(), threading.Event(), []

    def update(op: Op) -> None:
        ran.append(op.segment)
        begun.set()
        assert broken.wait(60)
        time.sleep(0.05)  # the error is noted by now

    def forward(_op: Op) -> None:
        assert begun.wait(60)
        broken.set()
        raise RuntimeError("lane broke")

    ops = [op(Kind.UPDATE, Lane.HOST), op(Kind.UPDATE, Lane.HOST), op(Kind.FORWARD, Lane.COMPUTE)]
    with pytest.raises(RuntimeError, match="lane broke"):
        run(ops, {Kind.UPDATE: update, Kind.FORWARD: forward})
    assert ran == ["L000"]


def test_an_error_says_at_which_op_it_came():
    def broken(_op: Op) -> None:
        raise RuntimeError("lane broke")

    with pytest.raises(RuntimeError, match="lane broke") as error:
        run([Op(Kind.FETCH, "L007", None, Lane.H2D, (Place("ram.w", "L007"),), (W0,))], {Kind.FETCH: broken})
    assert " ".join(error.value.__notes__[0].split()) == "op: FETCH L007 @h2d r:ram.w.L007 w:w.0"


def test_the_executor_serves_again_after_an_error():
    calls = []

    def fails_once(op: Op) -> None:
        calls.append(op)
        if len(calls) == 1:
            raise RuntimeError("first")

    executor = Executor(lane_devices(torch.device("cpu")), {Kind.FORWARD: fails_once})
    ops = (op(Kind.FORWARD, Lane.COMPUTE),)
    with pytest.raises(RuntimeError, match="first"):
        executor.run(ops)
    trace = executor.run(ops)
    executor.close()
    assert len(calls) == 2
    assert [row.op for row in trace.rows] == list(ops)


def test_trace_counts_busy_seconds_by_lane():
    trace = run([op(Kind.UPDATE, Lane.HOST)], {Kind.UPDATE: lambda _: time.sleep(0.02)})
    busy_s = trace.busy_s()
    assert 0.02 <= busy_s["host"] < 1
    assert busy_s["compute"] == 0


def test_closing_leaves_no_thread():
    before = set(threading.enumerate())
    run([op(Kind.FORWARD, Lane.COMPUTE)], {Kind.FORWARD: lambda _: None})
    assert set(threading.enumerate()) == before


def test_last_reads_are_those_before_an_overwrite_or_the_end():
    fetch = Op(Kind.FETCH, "L000", None, Lane.H2D, (), (W0,))
    first = Op(Kind.FORWARD, "L000", 0, Lane.COMPUTE, (W0,), ())
    second = Op(Kind.FORWARD, "L000", 1, Lane.COMPUTE, (W0,), ())
    again = Op(Kind.FETCH, "L001", None, Lane.H2D, (), (W0,))
    found = last_reads((fetch, first, second, again))
    assert found == {id(second): (W0,)}


def test_a_state_slot_is_read_for_the_last_time_when_it_is_stored():
    slot, home = Place("s", 0), Place("ram.state", "L000")
    update = Op(Kind.UPDATE, "L000", None, Lane.COMPUTE, (G0, slot, W0), (slot, W0))
    store = Op(Kind.STORE_STATE, "L000", None, Lane.D2H, (slot,), (home,))
    fetch = Op(Kind.FETCH_STATE, "L000", None, Lane.H2D, (home,), (slot,))
    assert last_reads((update, store, fetch)) == {id(store): (slot,)}


def test_no_last_read_where_readers_run_on_two_lanes_or_an_op_goes_on_adding():
    norm = Op(Kind.NORM, "L000", None, Lane.COMPUTE, (G0,), ())
    drain = Op(Kind.DRAIN, "L000", None, Lane.D2H, (G0,), ())
    zero = Op(Kind.ZERO, "L001", None, Lane.COMPUTE, (), (G0,))
    add = Op(Kind.BACKWARD, "L001", 0, Lane.COMPUTE, (G0,), (G0,))
    assert last_reads((norm, drain, zero, add)) == {}

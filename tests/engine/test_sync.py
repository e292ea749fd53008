"""MEGATRAIN_SYNC: one op at a time in the order of the list, so that a crash is at its op; the same bits."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor

from megatrain.engine.engine import SYNC
from megatrain.engine.executor import Executor
from megatrain.engine.lanes import LaneDevice, SlowLane, drained_lanes, lane_devices
from megatrain.models.spec_of import model_spec
from megatrain.schedule import Kind, Lane, Op, check, one_by_one
from tests.engine.streamed import Placement, Streamed, same_bytes
from tests.engine.test_identity import HYPERS, TOKENS, batches
from tests.families import tiny_config, tiny_masters
from tests.schedule.plans import DEVICE, STREAMED, plan_of, runs_of

SOME_OF_ALL = Placement(streamed=frozenset({"EMBED"}), state_on_disk=frozenset({"L001"}), offload=True)


def streamed() -> Streamed:
    config = tiny_config("llama")
    return Streamed(config, tiny_masters(model_spec(config)), TOKENS, precision="bf16", placement=SOME_OF_ALL)


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SYNC, "1")


def test_ops_run_one_at_a_time_in_the_order_of_the_list_and_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = streamed()
    other.train(batches()[:2], HYPERS[:2])
    assert SYNC not in caplog.text
    monkeypatch.setenv(SYNC, "1")
    with caplog.at_level(logging.WARNING, "megatrain"):
        run = streamed()
    assert SYNC in caplog.text
    run.train(batches()[:2], HYPERS[:2])
    trace = run.engine.trace
    assert trace is not None
    rows = sorted(trace.rows, key=lambda row: row.start)
    assert len({row.op.lane for row in rows}) == len(Lane)
    assert [row.op.records for row in rows] == [f"o{i}" for i in range(len(rows))]
    assert all(rows[i].end <= rows[i + 1].start for i in range(len(rows) - 1))
    assert same_bytes(run.state(), other.state()) == []
    for each in (run, other):
        each.close()


@pytest.mark.usefixtures("in_turn")
def test_a_crash_is_at_its_op_and_nothing_behind_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    run = streamed()
    begun: list[Op] = []

    def broken(*_: object) -> Tensor:
        raise RuntimeError("device-side assert")

    table = run.engine._handlers.table
    for kind, handler in list(table.items()):
        monkeypatch.setitem(table, kind, lambda op, handler=handler: (begun.append(op), handler(op)))
    monkeypatch.setattr(run.engine._handlers.template, "block", broken)
    with pytest.raises(RuntimeError, match="device-side assert") as error:
        run.train(batches()[:1], HYPERS[:1])
    assert error.value.__notes__[0].split()[:4] == ["op:", "FORWARD", "L000", "m0"]
    schedule = run.engine.schedule("train", len(batches()[0]))
    assert begun == [op for op in schedule if schedule.index(op) <= schedule.index(begun[-1])]
    run.close()


def test_an_op_counts_as_done_when_its_lane_has_drained() -> None:
    order: list[str] = []

    class Stream:
        def __init__(self, inner: LaneDevice) -> None:
            self.context, self.mark, self.wait = inner.context, inner.mark, inner.wait

        def drain(self) -> None:
            order.append("drained")

    lanes = drained_lanes(torch.device("cpu"))
    stream = Stream(lane_devices(torch.device("cpu"))[Lane.COMPUTE])
    ops = one_by_one((
        Op(Kind.FORWARD, "L000", 0, Lane.COMPUTE, (), ()),
        Op(Kind.DRAIN, "L000", None, Lane.D2H, (), ()),
    ))  # fmt: skip
    table = {Kind.FORWARD: lambda _: order.append("forward"), Kind.DRAIN: lambda _: order.append("drain")}
    executor = Executor({**lanes, Lane.COMPUTE: SlowLane(stream, stream.drain)}, table)
    executor.run(ops)
    executor.close()
    assert order[:3] == ["drained", "forward", "drained"]
    assert "drain" in order[3:]


def test_the_order_of_the_list_is_a_right_order() -> None:
    plan = plan_of([STREAMED, DEVICE], tied=True, round_micro_batches=1)
    runs = runs_of(plan, ["train", "eval", "train", "save"])
    check([run._replace(schedule=one_by_one(run.schedule)) for run in runs], plan)

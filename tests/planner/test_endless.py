"""Steps without end: refused by their size before anything is planned; what is long is priced without being played."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatrain.config import RunConfig
from megatrain.errors import PlanError
from megatrain.hardware import Machine
from megatrain.hardware.described import likely_rates
from megatrain.models.flops import train_flops
from megatrain.models.spec import ModelSpec
from megatrain.planner import Question, misfit, question_of, refuse_endless, search
from megatrain.planner.costs import VisitCosts, content_bytes
from megatrain.planner.prediction import step_of
from megatrain.planner.price import price_of
from megatrain.schedule.ops import Lane
from tests.planner.test_planner import CPU, GIB, GPU, asked_of, config_of, spec_of

SPEC, LARGER = spec_of(num_layers=24), spec_of(num_layers=12, hidden_size=1024)


def asked(config: RunConfig, spec: ModelSpec = SPEC, machine: Machine = GPU) -> Question:
    return question_of(spec, config, machine, likely_rates(machine))


@pytest.mark.parametrize("rows", [10**18 - 1, 10**8])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_without_end_is_refused_with_the_longest_that_would_do(device: str, rows: int) -> None:
    machine = {"cpu": CPU, "cuda": GPU}[device]
    with pytest.raises(PlanError, match=rf"^train_batch_size is {rows:,}: .* a step has [\d,]+ micro-batches") as error:
        asked_of(SPEC, config_of(device, train_batch_size=rows), machine)
    most = re.search(r"train_batch_size to at most (\d+)", str(error.value))
    assert most is not None
    longest = int(most[1])
    refuse_endless(asked(config_of(device, train_batch_size=longest)))
    with pytest.raises(PlanError, match="may have 20,164;"):
        refuse_endless(asked(config_of(device, train_batch_size=longest + 1)))


def test_no_change_is_proposed_that_makes_a_step_endless() -> None:
    config = config_of("cuda", train_batch_size=10**12, micro_batch_tokens=512 * 10**12)
    message = misfit(*asked_of(SPEC, config, GPU))
    assert message is not None
    assert "would fit" not in message


def test_a_step_of_many_rows_is_priced_without_a_list_of_them() -> None:
    question = asked(config_of("cuda", train_batch_size=10**15, micro_batch_tokens=512 * 10**15))
    price = price_of(question, search(question))
    assert price.model_flops == 10**15 * train_flops(SPEC, [512])


def test_a_run_of_more_days_than_a_calendar_has_is_priced() -> None:
    question = asked(config_of("cuda", max_steps=10**18))
    (line,) = [line for line in price_of(question, search(question)).lines() if line.startswith("run: ")]
    assert re.fullmatch(r"run: 1(,000){6} steps, [\d,]+ d \d+:\d\d:\d\d; [\d,]+ TB written to disk", line)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("machine", [GPU, replace(GPU, hbm_free_bytes=2 * GIB, ram_available_bytes=3 * GIB)])
def test_the_work_of_many_rounds_is_that_of_all_their_ops(machine: Machine, rows: int) -> None:
    config = config_of("cuda", train_batch_size=rows, micro_batch_tokens=512, round_micro_batches=1)
    question = asked(config, LARGER, machine)
    plan = search(question)
    ops = step_of(replace(plan, round_micro_batches=1), rows)
    costs, seconds, written = VisitCosts(question.work.costs, 1.0, {}), dict[Lane, float](), 0
    for op in ops:
        seconds[op.lane] = seconds.get(op.lane, 0.0) + costs.seconds(op)
        to_disk = [place for place in op.writes if op.lane is Lane.DISK and place.pool.startswith("disk")]
        written += sum(content_bytes(question.work.shapes, place, op.segment) for place in to_disk)
    price = price_of(question, plan)
    assert {lane: s for lane, s in price.prediction.work_s.items() if s} == pytest.approx(seconds, rel=1e-12)
    assert (price.step_written_bytes, price.step_written_bytes > 0) == (written, machine is not GPU)

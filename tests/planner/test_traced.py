"""A trace is laid over the schedule of its plan: times on one clock, rates fitted, another plan's trace refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.errors import PlanError
from megatrain.hardware.described import read_machine
from megatrain.planner import Question, predict, question_of
from megatrain.planner.chart import chart
from megatrain.planner.cheapest import search
from megatrain.planner.occupancy import occupancy
from megatrain.planner.traced import Span, calibrate, matched, read_trace, spans_of
from megatrain.schedule import Lane, Plan, Schedule, build, simulate
from tests.planner.test_planner import config_of, spec_of

H200 = read_machine("h200-125gb")
STREAMS = (Lane.COMPUTE, Lane.H2D, Lane.D2H)


@pytest.fixture(scope="module")
def question() -> Question:
    machine = replace(H200.machine, hbm_free_bytes=6 << 30)
    config = config_of("cuda", max_length=1024, micro_batch_tokens=2048, train_batch_size=6, save_strategy="no")
    return question_of(spec_of(6, 2048), config, machine, H200.rates)


@pytest.fixture(scope="module")
def plan(question: Question) -> Plan:
    return search(question)


def spans_at(question: Question, plan: Plan, slower: dict[str, float]) -> list[Span]:
    """What a machine would trace whose ops of some kinds take so many times longer, lane by lane, each on its clock."""
    costs = question.work.costs
    schedule = build(plan, "train", question.num_micro_batches, True)
    made = simulate(schedule, lambda op: costs.seconds(op) * slower.get(op.kind, 1.0))
    spans = spans_of(schedule, list(zip(made.start_s, made.finish_s, strict=True)))
    zeros = {
        on_stream: min((s.start_s for s in spans if (s.lane in STREAMS) == on_stream), default=0.0)
        for on_stream in (True, False)
    }
    moved = [s._replace(start_s=s.start_s - zeros[s.lane in STREAMS], end_s=s.end_s - zeros[s.lane in STREAMS])
             for s in spans]  # fmt: skip
    return sorted(moved, key=lambda s: [str(lane) for lane in Lane].index(s.lane))


def test_rates_are_fitted_kind_by_kind(question: Question, plan: Plan) -> None:
    slower = {"BACKWARD": 1.5, "UPDATE": 0.5, "FETCH": 2.0}
    rates = calibrate(question, plan, spans_at(question, plan, slower))
    for kind, scale in rates.scale.items():
        assert scale == pytest.approx(slower.get(kind, 1.0)), kind
    fitted = replace(question, work=replace(question.work, rates=rates))
    before, after = predict(question.work, plan), predict(fitted.work, plan)
    assert after.lanes_s[Lane.COMPUTE] > 1.2 * before.lanes_s[Lane.COMPUTE]


def test_times_come_onto_one_clock(question: Question, plan: Plan) -> None:
    """Streams count from their own first op: no op may start before what it waits for has ended."""
    follow_their_waits(*matched(streamed(plan), spans_at(question, streamed(plan), {"UPDATE": 30.0})))


def test_a_host_that_has_nothing_to_do_in_the_first_of_two_passes_has_its_clock_start_late(
    question: Question, plan: Plan
) -> None:
    """Its first op is CLIP: streams are half a step ahead."""
    whole = replace(streamed(plan), round_micro_batches=question.num_micro_batches)
    two_pass = replace(whole, clip_mode="two-pass", grad_landing_slots=2)
    spans = spans_at(question, two_pass, {})
    assert next(span.start_s for span in spans if span.kind == "CLIP") == 0.0
    schedule, times_s = matched(two_pass, spans)
    follow_their_waits(schedule, times_s)
    assert min(start_s for start_s, _ in times_s) == 0.0
    made = simulate(schedule, question.work.costs.seconds)
    assert max(end_s for _, end_s in times_s) == pytest.approx(made.makespan_s)


def streamed(plan: Plan) -> Plan:
    """Everything in RAM."""
    segments = tuple(
        replace(s, state="ram", weights="pool" if s.kind == "block" else "own",
                grads="pool" if s.kind == "block" else "own") for s in plan.segments
    )  # fmt: skip
    return replace(plan, segments=segments, weight_slots=2)


def follow_their_waits(schedule: Schedule, times_s: Sequence[tuple[float, float]]) -> None:
    ends_s = {op.records: end for op, (_, end) in zip(schedule, times_s, strict=True) if op.records}
    waits = [(token, start) for op, (start, _) in zip(schedule, times_s, strict=True) for token in op.waits]
    assert waits
    assert all(start >= ends_s[token] - 1e-9 for token, start in waits)


def test_a_trace_of_another_plan_is_refused(question: Question, plan: Plan) -> None:
    spans = spans_at(question, plan, {})
    other = replace(plan, segments=tuple(replace(s, state="ram", update="home") for s in plan.segments))
    with pytest.raises(PlanError, match="it is of another plan"):
        matched(other, spans)


def test_a_trace_with_more_or_less_than_the_plan_is_refused(question: Question, plan: Plan) -> None:
    spans = spans_at(question, plan, {})
    last = spans[-1]
    with pytest.raises(PlanError, match=f"where the plan ends on {last.lane}, the trace has {last.kind} "):
        matched(plan, [*spans, last])
    with pytest.raises(PlanError, match=f"where the plan has {last.kind} .* on {last.lane}, the trace ends"):
        matched(plan, spans[:-1])
    first = next(index for index, span in enumerate(spans) if span.kind == "FORWARD")
    other = [span._replace(micro_batch=1) if index == first else span for index, span in enumerate(spans)]
    with pytest.raises(PlanError, match="where the plan has FORWARD L000 m0 on compute, the trace has FORWARD L000 m1"):
        matched(plan, other)


ROW = {"kind": "FETCH", "segment": "L000", "micro_batch": None, "lane": "h2d", "start_s": 0.5, "end_s": 1.5}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"loss": 1}', "kind is missing"),
        ("FETCH L000", "not valid JSON"),
        ("[]", "a JSON object is expected, not list"),
        ("", "not valid JSON"),
        (json.dumps(ROW)[:-1] + ', "lane": "d2h"}', r"not valid JSON \(key 'lane' appears twice\)"),
        (json.dumps(ROW | {"stream": 7}), "unknown key 'stream'; Span has kind, segment, micro_batch"),
        (json.dumps({key: value for key, value in ROW.items() if key != "end_s"}), "end_s is missing"),
        (json.dumps(ROW | {"lane": "gpu"}), "lane is 'gpu': input should be 'compute'"),
        (json.dumps(ROW | {"kind": "FETSH"}), "kind is 'FETSH': input should be 'FETCH'"),
        (json.dumps(ROW | {"kind": ["FETCH"]}), r"kind is \['FETCH'\]"),
        (json.dumps(ROW | {"segment": 0}), "segment is 0: input should be a valid string"),
        (json.dumps(ROW | {"micro_batch": -1}), "micro_batch is -1: input should be greater"),
        (json.dumps(ROW | {"micro_batch": True}), "micro_batch is True: input should be a valid integer"),
        (json.dumps(ROW | {"start_s": "0"}), "start_s is '0': input should be a valid number"),
        (json.dumps(ROW | {"start_s": -0.1}), "start_s is -0.1: input should be greater"),
        (json.dumps(ROW | {"start_s": float("nan")}), "start_s is nan: input should be a finite number"),
        (json.dumps(ROW | {"end_s": float("inf")}), "end_s is inf: input should be a finite number"),
        (json.dumps(ROW | {"end_s": 1e300}), r"end_s is 1e\+300: input should be less"),
        (json.dumps(ROW | {"end_s": 0.25}), "end_s is 0.25, before start_s, 0.5"),
    ],
)
def test_a_line_that_no_run_writes_is_refused_with_its_number(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(ROW)}\n{line}\n")
    with pytest.raises(PlanError, match=f"is no trace of a run: line 2: {said}.*; give the trace.jsonl of one"):
        read_trace(file)


def test_a_trace_file_is_read_back(tmp_path: Path, question: Question, plan: Plan) -> None:
    spans = spans_at(question, plan, {})
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(span._asdict()) + "\n" for span in spans))
    assert read_trace(file) == spans
    with pytest.raises(PlanError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_a_real_trace_draws_the_same_chart_as_its_plan(question: Question, plan: Plan) -> None:
    drawn = []
    for slower in ({}, {"BACKWARD": 2.0}):
        schedule, times_s = matched(plan, spans_at(question, plan, slower))
        levels = occupancy(question, plan, schedule, times_s)
        drawn.append(chart("a step", spans_of(schedule, times_s), levels, {"hbm": 6 << 30}))
    assert drawn[0].count("<rect") == drawn[1].count("<rect")
    assert drawn[0] != drawn[1]

"""Traced: what a run's trace says of its plan: the ops with their real times, and rates fitted to them. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatrain.errors import PlanError
from megatrain.hardware.rates import Rates
from megatrain.planner.account import Question
from megatrain.planner.costs import CostModel
from megatrain.schedule.build import build
from megatrain.schedule.ops import Lane, Schedule
from megatrain.schedule.plan import Plan


class Span(NamedTuple):
    """One op of a lane, in seconds from the start of its program."""

    kind: str
    segment: str
    micro_batch: int | None
    lane: str
    start_s: float
    end_s: float


def read_trace(path: Path) -> list[Span]:
    """The rows of a trace.jsonl."""
    try:
        return [Span(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    except OSError as error:
        raise PlanError(f"--trace: {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise PlanError(f"--trace: {path} is no trace of a run ({error}); give the trace.jsonl of one") from None


def spans_of(schedule: Schedule, times_s: Sequence[tuple[float, float]]) -> list[Span]:
    """The same of a schedule whose times are known."""
    return [
        Span(op.kind, op.segment, op.micro_batch, op.lane, start_s, end_s)
        for op, (start_s, end_s) in zip(schedule, times_s, strict=True)
    ]


def matched(plan: Plan, spans: Iterable[Span]) -> tuple[Schedule, list[tuple[float, float]]]:
    """The schedule that a trace is of, and the times of its ops on one clock; PlanError if it is of another plan.

    Streams and host lanes have clocks of their own, each from its first op: the streams' is moved so that no op starts
    before what it waited for on the host ended.
    """
    lanes: dict[str, list[Span]] = {str(lane): [] for lane in Lane}
    for span in spans:
        lanes[span.lane].append(span)
    visits = 1 if plan.clip_mode == "deferred" else 2
    num_micro_batches = sum(span.kind == "HEAD" for span in lanes["compute"]) // visits or 1
    pending = _began_pending(plan, lanes)
    schedule = build(plan, "train", num_micro_batches, pending)
    waiting = {name: iter(rows) for name, rows in lanes.items()}
    found: list[Span] = []
    for op in schedule:
        span = next(waiting[op.lane], None)
        if span is None or (span.kind, span.segment) != (op.kind, op.segment):
            there = "ends" if span is None else f"has {span.kind} {span.segment}"
            raise PlanError(
                f"--trace: where the plan has {op.kind} {op.segment} on {op.lane}, the trace {there}: it is of another "
                "plan; give the plan.json of its run with --plan"
            )
        found.append(span)
    streams = ("compute", "h2d", "d2h")
    ends_s = {op.records: span.end_s for op, span in zip(schedule, found, strict=True) if op.lane not in streams}
    late_s = max(
        (
            ends_s[token] - span.start_s
            for op, span in zip(schedule, found, strict=True)
            if op.lane in streams
            for token in op.waits
            if token in ends_s
        ),
        default=0.0,
    )
    shift_s = {lane: max(0.0, late_s) if lane in streams else 0.0 for lane in lanes}
    return schedule, [(s.start_s + shift_s[s.lane], s.end_s + shift_s[s.lane]) for s in found]


def _began_pending(plan: Plan, lanes: Mapping[str, Sequence[Span]]) -> bool:
    """Whether the program before the traced one left it something to do."""
    if plan.clip_mode == "deferred":
        return any(span.kind == "UPDATE" for lane in lanes.values() for span in lane)
    on_disk = sum(segment.state_on_disk or (segment.weights_on_disk and segment.trainable) for segment in plan.segments)
    spills = sum(span.kind == "SPILL" for span in lanes["disk"])
    return spills > on_disk - len(plan.spilled_late)


def calibrate(question: Question, plan: Plan, spans: Iterable[Span]) -> Rates:
    """The rates of the question with `scale` fitted: for each kind of op, measured seconds ÷ modelled ones."""
    work = question.work
    plain = replace(work.rates, scale={})
    model = CostModel(work.shapes, plain, work.document_tokens, work.on_cpu)
    schedule, times_s = matched(plan, spans)
    measured, modelled = (
        _sums(schedule, [end_s - start_s for start_s, end_s in times_s]),
        _sums(schedule, [model.seconds(op) for op in schedule]),
    )
    scale = {kind: seconds / modelled[kind] for kind, seconds in measured.items() if seconds > 0.0}
    return replace(work.rates, source="fitted to a trace", scale=scale)


def _sums(schedule: Schedule, seconds: Sequence[float]) -> Mapping[str, float]:
    sums: dict[str, float] = {}
    for op, value in zip(schedule, seconds, strict=True):
        sums[str(op.kind)] = sums.get(str(op.kind), 0.0) + value
    return sums

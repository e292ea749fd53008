"""Traced: what a run's trace says of its plan: the ops with their real times, and rates fitted to them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from megatrain.errors import PlanError
from megatrain.hardware.rates import Rates
from megatrain.planner.account import Question
from megatrain.planner.costs import CostModel
from megatrain.schedule.build import build
from megatrain.schedule.ops import Kind, Lane, Op, Schedule
from megatrain.schedule.plan import Plan
from megatrain.strict_json import typed

STREAMS = (Lane.COMPUTE, Lane.H2D, Lane.D2H)


class Span(NamedTuple):
    """One op of a lane, in seconds from the start of its program."""

    kind: Kind
    segment: str
    micro_batch: Annotated[int, Field(ge=0)] | None
    lane: Lane
    start_s: Annotated[float, Field(ge=0)]
    end_s: Annotated[float, Field(ge=0, le=1e9)]


def read_trace(path: Path) -> list[Span]:
    """The rows of a trace.jsonl."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise PlanError(f"--trace: {path} cannot be read: {error.strerror}") from None
    spans, remedy = [], "give the trace.jsonl of one"
    for number, line in enumerate(lines, start=1):
        where = f"--trace: {path} is no trace of a run: line {number}"
        span = typed(Span, line, where, PlanError, remedy)
        if span.end_s < span.start_s:
            raise PlanError(f"{where}: end_s is {span.end_s}, before start_s, {span.start_s}; {remedy}")
        spans.append(span)
    return spans


def spans_of(schedule: Schedule, times_s: Sequence[tuple[float, float]]) -> list[Span]:
    """The same of a schedule whose times are known."""
    return [
        Span(op.kind, op.segment, op.micro_batch, op.lane, start_s, end_s)
        for op, (start_s, end_s) in zip(schedule, times_s, strict=True)
    ]


def matched(plan: Plan, spans: Iterable[Span]) -> tuple[Schedule, list[tuple[float, float]]]:
    """The schedule that a trace is of, and the times of its ops on one clock; PlanError if it is of another plan.

    Streams and host lanes have clocks of their own. The streams' is moved by as little as lets no op start before what
    it waited for on the other clock ended; all of it starts at 0.
    """
    lanes: dict[Lane, list[Span]] = {lane: [] for lane in Lane}
    for span in spans:
        lanes[span.lane].append(span)
    visits = 1 if plan.clip_mode == "deferred" else 2
    num_micro_batches = sum(span.kind == "HEAD" for span in lanes[Lane.COMPUTE]) // visits or 1
    pending = _began_pending(plan, lanes)
    schedule = build(plan, "train", num_micro_batches, pending)
    for lane, rows in lanes.items():
        for op, span in zip_longest((op for op in schedule if op.lane is lane), rows):
            if op is None or span is None or span[:3] != (op.kind, op.segment, op.micro_batch):
                raise PlanError(
                    f"--trace: where the plan {_said(op)} on {lane}, the trace {_said(span)}: it is of another plan; "
                    "give the plan.json of its run with --plan"
                )
    waiting = {lane: iter(rows) for lane, rows in lanes.items()}
    found = [next(waiting[op.lane]) for op in schedule]
    late_s = _streams_late_s(schedule, found)
    moved = [(s.start_s + late_s, s.end_s + late_s) if s.lane in STREAMS else (s.start_s, s.end_s) for s in found]
    zero_s = min((start_s for start_s, _ in moved), default=0.0)
    return schedule, [(start_s - zero_s, end_s - zero_s) for start_s, end_s in moved]


def _said(what: Op | Span | None) -> str:
    if what is None:
        return "ends"
    return f"has {what.kind} {what.segment}" + ("" if what.micro_batch is None else f" m{what.micro_batch}")


def _streams_late_s(schedule: Schedule, spans: Sequence[Span]) -> float:
    """What to add to times of streams to have them on the clock of the host's lanes."""
    span_of = {op.records: span for op, span in zip(schedule, spans, strict=True)}
    least_s, most_s = float("-inf"), float("inf")
    for op, span in zip(schedule, spans, strict=True):
        for before in (span_of[token] for token in op.waits):
            if span.lane in STREAMS and before.lane not in STREAMS:
                least_s = max(least_s, before.end_s - span.start_s)
            elif span.lane not in STREAMS and before.lane in STREAMS:
                most_s = min(most_s, span.start_s - before.end_s)
    return max(least_s, min(0.0, most_s))


def _began_pending(plan: Plan, lanes: Mapping[Lane, Sequence[Span]]) -> bool:
    """Whether the program before the traced one left it something to do."""
    if plan.clip_mode == "deferred":
        return any(span.kind == "UPDATE" for lane in lanes.values() for span in lane)
    on_disk = sum(segment.state_on_disk or (segment.weights_on_disk and segment.trainable) for segment in plan.segments)
    spills = sum(span.kind == "SPILL" for span in lanes[Lane.DISK])
    return spills > on_disk - len(plan.spilled_late)


def calibrate(question: Question, plan: Plan, spans: Iterable[Span]) -> Rates:
    """The rates of the question with `scale` fitted: for each kind of op, measured seconds ÷ modelled ones."""
    work = question.work
    plain = replace(work.rates, scale={})
    model = CostModel(work.shapes, plain, work.document_tokens, work.on_cpu)
    schedule, times_s = matched(plan, spans)
    measured = _sums(schedule, [end_s - start_s for start_s, end_s in times_s])
    modelled = _sums(schedule, [model.seconds(op) for op in schedule])
    scale = {kind: seconds / modelled[kind] for kind, seconds in measured.items() if seconds > 0.0}
    return replace(work.rates, source="fitted to a trace", scale=scale)


def _sums(schedule: Schedule, seconds: Sequence[float]) -> Mapping[str, float]:
    sums: dict[str, float] = {}
    for op, value in zip(schedule, seconds, strict=True):
        sums[str(op.kind)] = sums.get(str(op.kind), 0.0) + value
    return sums

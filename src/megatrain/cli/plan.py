"""`megatrain plan`: where every byte of a run will be and what a step will cost, before a byte moves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path

from megatrain.cli import show
from megatrain.cli.assemble import Planned, planned
from megatrain.config import RunConfig
from megatrain.errors import ConfigError
from megatrain.hardware.described import Described, read_machine
from megatrain.planner import misfit
from megatrain.planner.chart import chart
from megatrain.planner.occupancy import Level, occupancy
from megatrain.planner.price import Price, price_of
from megatrain.planner.traced import Span, calibrate, matched, read_trace, spans_of
from megatrain.schedule.build import rounds
from megatrain.schedule.plan import Tier


def plan(
    config: RunConfig,
    *,
    machine: str | None,
    plan_file: Path | None,
    trace: Path | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Print the plan and its price, and what would fit if it does not. 0 if it fits, 1 if not."""
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot: {plot} is no .svg; the picture is SVG, which every browser shows and prints")
    if plot is not None and (plot.is_dir() or not plot.absolute().parent.is_dir()):
        raise ConfigError(f"--plot: {plot} cannot be written: its folder is not there, or it is one itself")
    described = None if machine is None else read_machine(machine)
    run = planned(config, plan_file=plan_file, described=described)
    spans = None if trace is None else read_trace(trace)
    if spans is not None:
        run = replace(run, rates=calibrate(run.question, run.plan, spans))
    price = price_of(run.question, run.plan)
    if plot is not None:
        plot.write_text(picture(run, price, spans), "utf-8")
    reason = misfit(run.question, run.plan, None if price.num_steps is None else range(price.num_steps), plan_file)
    if as_json:
        print(json.dumps({**plan_json(run, price, described), "misfit": reason}, indent=1))
    else:
        lines = text_lines(run, price, described) + show.advice_lines(run.config, run.machine)
        if plot is not None:
            lines.append(f"picture: {plot}")
        if spans is not None:
            lines += trace_lines(spans, price)
        print("\n".join([*lines, reason] if reason else lines))
    return 0 if reason is None else 1


def text_lines(run: Planned, price: Price, described: Described | None) -> list[str]:
    """The machine, and whether it is the one under us; the plan and its price."""
    about = [] if described is None else [f"not this machine: {described.about}"]
    plan_lines = show.plan_lines(run.spec, run.plan, run.table)
    return [show.machine_line(run.machine), *about, *plan_lines, *price.lines()]


def plan_json(run: Planned, price: Price, described: Described | None) -> dict[str, object]:
    """Everything that is printed; `--plan` reads it back."""
    return {
        **show.plan_json(run.spec, run.plan, run.table, run.machine),
        "described": None if described is None else described.about,
        "rates": asdict(run.rates),
        "price": price.table(),
    }


def trace_lines(spans: Sequence[Span], price: Price) -> list[str]:
    """Real seconds beside simulated ones, lane by lane."""
    real_s = busy_s(spans)
    whole_s = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    text = [f"trace: {whole_s:.3f} s; simulated at the rates fitted to it: {price.prediction.step_s:.3f} s"]
    for lane, simulated_s in price.prediction.lanes_s.items():
        if simulated_s or real_s.get(lane):
            text.append(f"  {lane:<8}{real_s.get(lane, 0.0):>9.3f} s busy, simulated {simulated_s:.3f} s")
    return text


def busy_s(spans: Sequence[Span]) -> Mapping[str, float]:
    """Lane -> seconds in which it worked."""
    table: dict[str, float] = {}
    for span in spans:
        table[span.lane] = table.get(span.lane, 0.0) + span.end_s - span.start_s
    return table


def picture(run: Planned, price: Price, trace: Sequence[Span] | None) -> str:
    """The chart of the plan, or of the trace if there is one."""
    question, plan = run.question, run.plan
    if trace is not None:
        schedule, times_s = matched(plan, trace)
        title, count = f"a real step of {run.spec.architecture}", 1
    else:
        made = price.prediction
        schedule, times_s = made.schedule, list(made.times_s)
        parts = rounds(question.num_micro_batches, plan.round_micro_batches)
        count = ceil(question.num_micro_batches / len(parts))
        title = f"a simulated step of {run.spec.architecture} on {run.machine.device_name}"
        if len(parts) > len({op.micro_batch for op in schedule if op.micro_batch is not None}):
            title += f" ({len(parts)} rounds, of which three are drawn)"
    levels: Mapping[Tier, Sequence[Level]] = occupancy(question, plan, schedule, times_s, count)
    return chart(title, spans_of(schedule, times_s), levels, run.table.budgets)

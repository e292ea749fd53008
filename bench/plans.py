"""python -m bench plans: plans that the planner alone chose, run, beside what it said of them.

Every setting of bench/plan_settings.py is planned with the rates of this machine (those that `megatrain doctor` keeps,
else the shipped machine with such a GPU), set up as `megatrain train` would, on random weights and tokens, in a
process of its own (what an earlier one left in memory would count as its own), and timed after one warm-up of the
whole run. One JSON line a setting is appended to bench/results/<machine>.jsonl: seconds and peak bytes, predicted and
measured, and what the peaks are made of. A setting that fails is recorded with its reason. A line holds all that a
prediction is made of (`asked`, resolved config, whole plan, machine, rates): `python -m bench planning` predicts it
again by today's constants, and lays that beside what was measured. What the constants of the account
(planner/sizes.py) are to be stands there too: outside_pool_bytes, unused_pool_bytes and program_ram_bytes, and
working_bytes (kind of op: at its peak, left at its end) beside predicted_working_bytes. Where the program has changed
since in what a line measured, `before` is added to the line by hand, and says what was otherwise.
  --plan-only          plan for a described machine (--machine h200-125gb) and run nothing
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import torch

from bench.baseline import PlainStep
from bench.plan_again import RESOLVED
from bench.plan_run import Run, batches_of, play
from bench.plan_settings import PLAIN_KEEP, SETTINGS, Setting
from bench.results import record
from bench.step import HYPER, machine_name, supervised_of, used_hbm_bytes
from bench.timing import Pace, timed
from megatrain.cli.assemble import Planned, planned
from megatrain.hardware.described import Described, read_machine
from megatrain.planner import family, memory_table, sizes
from megatrain.planner.price import Price, price_of
from megatrain.planner.table import gib
from megatrain.schedule.plan import Plan

P, Returned = ParamSpec("P"), TypeVar("Returned")
FAILURES = (RuntimeError, ValueError, KeyError, OSError, MemoryError, AssertionError)  # of one setting


def plain_line(run: Planned, setting: Setting, system: str, pace: Pace) -> dict[str, object]:
    """The same step in plain PyTorch, all in HBM."""
    batches = batches_of(run)
    chunk = run.config.loss_chunk_tokens
    assert chunk is not None, "planned resolves the config"
    dtype = torch.bfloat16 if run.config.precision == "bf16" else torch.float32
    supervised = supervised_of(batches)
    plain = PlainStep(
        run.hf_config, HYPER, run.device, dtype, loss_chunk_tokens=chunk, keep=system == PLAIN_KEEP,
        compiled=bool(run.config.compile),
    )  # fmt: skip
    with closing(plain):
        steps_s = timed(lambda: plain.step(batches, supervised), pace, lambda: None)
    return {
        "system": system, "setting": setting.name, **asked(setting),
        "step_s": statistics.median(steps_s), "step_s_min": min(steps_s), "step_s_max": max(steps_s),
        "steps": len(steps_s), "peak_hbm_bytes": used_hbm_bytes(),
    }  # fmt: skip


def asked(setting: Setting) -> dict[str, object]:
    """What a setting asks for."""
    return {
        "model": setting.model, "layers": setting.layers, "fields": dict(setting.fields),
        "seq_tokens": setting.max_length, "step_tokens": setting.step_tokens,
        "micro_batch_tokens": setting.micro_batch_tokens, "memory": dict(setting.memory),
        "by_hand": dict(setting.by_hand),
    }  # fmt: skip


def chosen(run: Planned, price: Price) -> dict[str, object]:
    """What the planner chose, and says of it."""
    table = run.table
    return {
        "plan": summary(run.plan), "verdict": table.overall, "rates": run.rates.source,
        "made_of": made_of(run),
        "predicted_step_s": price.prediction.step_s, "bound": price.prediction.bound,
        "predicted_lanes": {str(lane): s for lane, s in price.prediction.lanes_s.items()},
        "predicted_bytes": {tier: table.total_bytes(tier) for tier in ("hbm", "ram", "disk")},
        "budget_bytes": dict(table.budgets),
        "rows": {f"{row.tier}: {row.component}": row.num_bytes for row in table.rows},
        "predicted_working_bytes": {
            "BACKWARD": run.question.shapes.block_working_bytes,
            "HEAD": sizes.head_working_bytes(run.question.shapes),
            "EMBED_BACKWARD": sizes.embedding_working_bytes(run.question.shapes),
            "BACKWARD of what is kept": max(
                sizes.backward_working_bytes(run.question.shapes, block.name, is_kept=True) for block in run.plan.blocks
            ),
            "kept by a FORWARD": max(run.question.shapes.saved_bytes.values()),
        },
    }  # fmt: skip


def made_of(run: Planned) -> dict[str, object]:
    """What a prediction follows from, beside what the setting asks for; `bench.plan_again` reads it."""
    config = run.config.model_dump(mode="json", include=set(RESOLVED))
    return {
        "config": config, "plan": asdict(run.plan), "machine": asdict(run.machine), "rates": asdict(run.rates),
    }  # fmt: skip


def summary(plan: Plan) -> dict[str, object]:
    """Segments placed alike, counted, and the numbers of a plan."""
    places = Counter(
        " ".join(
            [s.kind, f"state={s.state}", f"weights={s.weights}"]
            + ([f"activations={s.activations}"] if s.kind == "block" else [])
            + (["weights_home=disk"] if s.weights_on_disk else [])
            + (["update=device"] if s.streams_state else [])
        )
        for s in plan.segments
    )
    return {
        "segments": dict(places), "round_micro_batches": plan.round_micro_batches, "clip_mode": plan.clip_mode,
        "weight_slots": plan.weight_slots, "grad_slots": plan.grad_slots, "disk_slots": plan.disk_slots,
        "state_slots": plan.state_slots,
    }  # fmt: skip


def line_of(setting: Setting, run: Planned, price: Price, seen: Run) -> dict[str, object]:
    """The figures of one setting; ratios are measured / predicted."""
    step_s = statistics.median(seen.steps_s)
    told = chosen(run, price)
    hbm, ram = run.table.total_bytes("hbm"), run.table.total_bytes("ram")
    program = sizes.program_ram_bytes(run.question.shapes, run.machine.device)
    before = seen.marks["begun"]
    return {
        "system": "megatrain", "setting": setting.name, "process": "own", **asked(setting), **told,
        "step_s": step_s, "step_s_min": min(seen.steps_s), "step_s_max": max(seen.steps_s), "steps": len(seen.steps_s),
        "step_ratio": step_s / price.prediction.step_s, "lanes": seen.lanes_s, "kinds_s": seen.kinds_s,
        "start_s": seen.start_s,
        "peak_hbm_bytes": seen.peak_hbm_bytes, "hbm_ratio": seen.peak_hbm_bytes / hbm if hbm else None,
        "peak_ram_bytes": seen.peak_ram_bytes, "ram_ratio": seen.peak_ram_bytes / ram,
        "within_budget": within(run, seen),
        # what the constants of the account are to be: context and kernels, what the pool holds and does not use,
        # and the program before anything of the run was there
        "outside_pool_bytes": {name: at.outside for name, at in seen.marks.items()},
        "unused_pool_bytes": max(0, seen.marks["end"].reserved - seen.peak_allocated_bytes),
        "peak_allocated_bytes": seen.peak_allocated_bytes,
        "program_ram_bytes": seen.peak_ram_bytes - ram + program,
        "rss_before_bytes": before.rss,
        "marks": {name: asdict(at) for name, at in seen.marks.items()},
        "working_bytes": seen.working_bytes,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", "")),
    }  # fmt: skip


def within(run: Planned, seen: Run) -> dict[str, bool]:
    """Whether each tier kept to what was asked for it."""
    asked_bytes = {"hbm": run.config.memory.hbm, "ram": run.config.memory.ram}
    peaks = {"hbm": seen.peak_hbm_bytes, "ram": seen.peak_ram_bytes}
    return {tier: peaks[tier] <= budget for tier, budget in asked_bytes.items() if budget is not None}


def plan_of(setting: Setting, scratch: Path, described: Described | None) -> Planned:
    """The planner's own choice for a setting, but for what is set by hand, for this machine or a described one."""
    source = scratch / "model" / setting.name
    setting.model_config().save_pretrained(source)
    with nullcontext() if setting.passes else patch.object(family, "passing_share", return_value=0.0):
        run = planned(setting.run_config(str(source), str(scratch / "run")), described=described)
    plan = replace(run.plan, **setting.by_hand)
    if not plan.state_slots:
        plan = replace(plan, segments=tuple(replace(segment, update="home") for segment in plan.segments))
    return replace(run, plan=plan, table=memory_table(run.question, plan))


def shown(line: dict[str, object]) -> str:
    """A line of the results in one glance."""
    keys = ("setting", "system", "failed", "verdict", "predicted_step_s", "step_s", "step_ratio", "hbm_ratio",
            "ram_ratio", "within_budget", "bound", "plan")  # fmt: skip
    short = {key: round(v, 4) if isinstance(v := line[key], float) else v for key in keys if key in line}
    return json.dumps(short)


def measure(setting: Setting, system: str, scratch: Path, pace: Pace) -> tuple[str, dict[str, object]]:
    """(Machine, what is recorded) of one system in one setting; in a process of its own, whose peaks are the run's."""
    try:
        run = plan_of(setting, scratch, None)
        line = own_line(run, setting, pace) if system == "megatrain" else plain_line(run, setting, system, pace)
    except FAILURES as error:
        line = failed(setting, system, error)
    return this_machine(), line


def this_machine() -> str:
    """Its name in results."""
    return machine_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def own_line(run: Planned, setting: Setting, pace: Pace) -> dict[str, object]:
    """The plan that was chosen, run."""
    price = price_of(run.question, run.plan)
    if run.table.overall == "NO":
        return {"system": "megatrain", "setting": setting.name, **asked(setting), **chosen(run, price),
                "failed": "the planner finds no plan that fits"}  # fmt: skip
    return line_of(setting, run, price, play(run, pace))


def failed(setting: Setting, system: str, error: Exception) -> dict[str, object]:
    """The line of what could not be measured."""
    reason = f"{type(error).__name__}: {error}"[:600]
    return {"system": system, "setting": setting.name, **asked(setting), "failed": reason}


class Bench:
    """One run of the benchmark: a clock for the whole, one warm-up, a line a measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started = time.perf_counter()
        self.lines: list[dict[str, object]] = []
        self._warm = False
        self._plain: set[tuple[object, ...]] = set()
        self._processes = multiprocessing.get_context("spawn")  # a fork would not count the libraries' pages as its own

    def pace(self) -> Pace:
        """The first that runs warms the chip, which is faster in its first seconds."""
        warm_s = self.args.again_warm if self._warm else self.args.warm
        return Pace(warm_s, self.args.steps, self.args.most_s)

    def out_of_time(self) -> bool:
        """Whether nothing more may be begun."""
        return time.perf_counter() - self.started > self.args.limit_s

    def setting(self, setting: Setting, scratch: Path) -> None:
        """Measure a setting, and the plain steps that it is held against, next to each other."""
        self._measure(setting, "megatrain", scratch)
        for system in setting.against:
            key = (setting.shape, setting.step_tokens, system)
            if key not in self._plain and not self.args.no_plain:
                self._plain.add(key)
                self._measure(setting, system, scratch)

    def _apart(self, function: Callable[P, Returned], *args: P.args, **kwargs: P.kwargs) -> Returned:
        """In a process of its own. CUDA in this one, were it only to tell its name, might take memory from all."""
        with ProcessPoolExecutor(1, mp_context=self._processes) as process:
            return process.submit(function, *args, **kwargs).result()

    def _measure(self, setting: Setting, system: str, scratch: Path) -> None:
        if self.out_of_time():
            print(json.dumps({"setting": setting.name, "system": system, "left out": "time is up"}), flush=True)
            return
        began = time.perf_counter()
        try:
            machine, line = self._apart(measure, setting, system, scratch, self.pace())
            self._warm = self._warm or "failed" not in line
        except BrokenProcessPool as error:  # killed, for memory as a rule
            machine, line = self._apart(this_machine), failed(setting, system, error)
        line["wall_s"] = time.perf_counter() - began
        self.lines.append(line)
        record("plans", line, on=machine, folder=self.args.results)
        print(shown(line), flush=True)


def against_plain(lines: Sequence[dict[str, object]], settings: Sequence[Setting]) -> Iterator[str]:
    """Tokens a second of each setting against the best plain step of its shape that it names."""
    times_s = {(line["setting"], line["system"]): line["step_s"] for line in lines if "step_s" in line}
    shapes = {setting.name: (setting.shape, setting.step_tokens) for setting in settings}
    for setting in settings:
        own_s = times_s.get((setting.name, "megatrain"))
        plain_s = [
            s
            for (name, system), s in times_s.items()
            if system in setting.against and shapes[str(name)] == shapes[setting.name]
        ]
        if isinstance(own_s, float) and plain_s:
            best_s = min(s for s in plain_s if isinstance(s, float))
            yield f"{setting.name}: {best_s / own_s:.3f} x the best plain step ({best_s:.3f} s; here {own_s:.3f} s)"


def print_plans(settings: Sequence[Setting], scratch: Path, described: Described | None) -> None:
    """What would be run."""
    for setting in settings:
        run = plan_of(setting, scratch, described)
        price = price_of(run.question, run.plan)
        made = price.prediction
        lanes = {str(lane): round(seconds, 3) for lane, seconds in made.lanes_s.items() if seconds}
        totals = {tier: gib(run.table.total_bytes(tier)) for tier in ("hbm", "ram", "disk")}
        print(f"{setting.name}: {run.table.overall}, {made.step_s:.3f} s, bound by {made.bound}; {lanes}; {totals}")
        print(f"    {summary(run.plan)}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench plans", description=__doc__)
    parser.add_argument("--only", default="", help=f"names, with commas, of: {', '.join(s.name for s in SETTINGS)}")
    parser.add_argument("--no-plain", action="store_true", help="leave the plain PyTorch steps out")
    parser.add_argument("--limit-s", type=float, default=260.0, help="nothing more is begun after so many seconds")
    parser.add_argument("--warm", type=float, default=30.0, help="seconds of the one warm-up")
    parser.add_argument(
        "--again-warm", type=float, default=2.0, help="seconds of warm steps of each further setting, two at least"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--most-s", type=float, default=8.0, help="of a setting's timed steps, but for the first two")
    parser.add_argument("--plan-only", action="store_true", help="print the plans and run nothing")
    parser.add_argument("--machine", default="", help="with --plan-only: a described machine instead of this one")
    parser.add_argument(
        "--scratch", type=Path, default=None, help="folder on the disk to use; default: a temporary one"
    )
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(argv)


def main(argv: Sequence[str], settings: Sequence[Setting] = SETTINGS) -> int:
    """Plan, run and record the settings asked for. 1 if any failed."""
    args = parse(argv)
    names = set(filter(None, args.only.split(",")))
    unknown = names - {setting.name for setting in settings}
    if unknown:
        raise SystemExit(f"--only: no setting is called {', '.join(sorted(unknown))}")
    wanted = [setting for setting in settings if not names or setting.name in names]
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        if args.plan_only:
            print_plans(wanted, Path(folder), read_machine(args.machine) if args.machine else None)
            return 0
        bench = Bench(args)
        for setting in wanted:
            bench.setting(setting, Path(folder))
    for text in against_plain(bench.lines, settings):
        print(text)
    return int(any("failed" in line for line in bench.lines))

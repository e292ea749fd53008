"""docs/planning.md: two large plans as `megatrain plan` prints them, predicted steps beside the measured ones, and the
planner's own plans as `python -m bench plans` ran them, predicted again by today's constants.

`python -m bench planning` prints the page, `--write` writes it.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.placement import COUNTS, make_plan, placed
from bench.plan_again import again, recorded
from bench.presets import PRESETS
from bench.results import RESULTS
from bench.step import load_config, parse
from megatrain.cli.assemble import planned
from megatrain.cli.plan import text_lines
from megatrain.cli.wanted import config_to_plan
from megatrain.hardware.described import read_machine
from megatrain.hardware.rates import Rates
from megatrain.models.layout import layout_of
from megatrain.models.spec_of import model_spec
from megatrain.planner import Prediction, Workload, predict
from megatrain.planner.price import price_of
from megatrain.planner.sizes import Shapes
from megatrain.schedule import Lane

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
DATA = Path(__file__).parents[1] / "tests" / "planner" / "data"
H200 = RESULTS / "NVIDIA-H200-Intel-Xeon-16-cores.jsonl"
# heading of the page -> (model folder, machine, words of the command)
PLANS = {
    "gpt-oss-120b": ("h200-1.5tb", ("max_length=8192", "train_batch_size=64", "max_steps=1000", "save_strategy=no")),
    "dense-175b": ("b200-192gb", ("max_length=2048", "train_batch_size=256", "max_steps=1000")),
}
# a step with a disk -> the run of `bench plans` minutes before or after, on the same machine
DOCTOR_BESIDE = {"27afb576": "26a1ae07", "70c642df": "56acb1a0"}
BLOCK = re.compile(r"(<!-- made: (\S+) -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


def measured_steps() -> list[dict[str, Any]]:
    """Every step of MegaTrain that was measured on the H200 with a model whose shape is known here, but those of a
    program that updated in state slots of their own: no plan has them any more."""
    rows = [json.loads(line) for line in H200.read_text().splitlines()]
    steps = [r for r in rows if r["bench"] == "step" and r["system"] == "megatrain" and r["model"] in PRESETS]
    return [step for step in steps if not step.get("device_update")]


def predicted(row: Mapping[str, Any]) -> Prediction:
    """What the planner says of a measured setting; the command has what the line leaves out."""
    args = placed(parse(shlex.split(row["command"])[4:]), "")
    placement = {key: row[key] for key in vars(args) if isinstance(row.get(key), str) and key != "model"}
    placement |= {key: row[key] for key in COUNTS if key in row}
    made = SimpleNamespace(**vars(args) | placement)
    spec = model_spec(load_config(made))  # type: ignore[arg-type]
    plan = make_plan(spec, made, row["micro_batches"])  # type: ignore[arg-type]
    layouts = {segment.name: layout_of(segment) for segment in spec.segments}
    shapes = Shapes(spec, layouts, 2, made.micro_batch_tokens, made.loss_chunk, not made.eager, fused_loss=True)
    rates = rates_of(row)
    return predict(Workload(shapes, rates, row["micro_batches"], made.seq, on_cpu=False), plan)


def rates_of(row: Mapping[str, Any]) -> Rates:
    """Those of the described machine, but the drive's where `doctor` took them of the same machine in that hour."""
    rates = read_machine("h200-125gb").rates
    if row["run"] not in DOCTOR_BESIDE:
        return rates
    taken = next(r["made_of"]["rates"] for r in recorded(H200)[0] if r["run"] == DOCTOR_BESIDE[row["run"]])
    return replace(rates, disk_read_Bps=taken["disk_read_Bps"], disk_write_Bps=taken["disk_write_Bps"])


def homes(row: Mapping[str, Any]) -> str:
    """The placement of a measured setting in words."""
    words = {"resident": "state in HBM", "device_update": "updated on the GPU", "offload": "inputs in RAM",
             "keep_attention": "attention kept",
             "state_disk": "state on disk", "weights_disk": "weights on disk"}  # fmt: skip
    found = []
    for key, what in words.items():
        names = [name for name in str(row.get(key) or "").split(",") if name]
        ends = [name for name in names if not name.startswith("L")]
        blocks = len(names) - len(ends)
        if names:
            found.append(f"{what}: {' + '.join([*ends, *([f'{blocks} blocks'] if blocks else [])])}")
    return "; ".join(found) or "all state in RAM"


def backtest() -> Iterator[str]:
    """One line a measured step."""
    yield "| setting | measured | predicted | ratio | compute lane, measured / predicted |"
    yield "|---|---|---|---|---|"
    for row in measured_steps():
        made = predicted(row)
        shape = f"{row['model']}, {row['layers']} layers, {row['step_tokens'] // 1024}K tokens"
        lanes = f"{row['lanes']['compute']:.2f} / {made.lanes_s[Lane.COMPUTE]:.2f} s"
        ratio = made.step_s / row["step_s"]
        yield (
            f"| {shape}, {row['activations']}, {homes(row)} (run {row['run']}) | {row['step_s']:.2f} s "
            f"| {made.step_s:.2f} s | {ratio:.2f} | {lanes} |"
        )


def alone(row: Mapping[str, Any]) -> bool:
    """Whether a line was measured in a process of its own, by the program as it is (or was `before`)."""
    return "process" in row and "variant" not in row


def plans_backtest(path: Path = H200) -> Iterator[str]:
    """One line a plan that was chosen, run and recorded whole."""
    rows, without = recorded(path)
    apart = [row for row in rows if alone(row)]
    yield "| setting | step measured | predicted | ratio | HBM measured, predicted | ratio | RAM | ratio |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in apart:
        made = again(row)
        told = [f"{row['setting']} (run {row['run']})", f"{row['step_s']:.3f} s", f"{made.prediction.step_s:.3f} s",
                f"{made.step_ratio:.2f}"]  # fmt: skip
        for tier in ("hbm", "ram"):
            seen, said = made.compared_bytes(tier)
            note = " *" if tier == "hbm" and made.was_before else ""
            told += [f"{seen / 1e9:.2f}, {said / 1e9:.2f} GB{note}", f"{made.bytes_ratio(tier):.3f}"]
        yield f"| {' | '.join(told)} |"
    yield ""
    yield (
        f"Left out: {without} measured lines of before hold no whole plan, and {len(rows) - len(apart)} were measured "
        "in one process or in forked ones, where what was there before counts as their own, or does not count."
    )


def block(name: str) -> str:
    """What stands between the marks of a name."""
    tables = {"backtest": backtest, "plans": plans_backtest}
    if name in tables:
        return "\n".join(tables[name]())
    machine, words = PLANS[name]
    described = read_machine(machine)
    run = planned(config_to_plan(DATA / name, words), described=described)
    shown = text_lines(run, price_of(run.question, run.plan), described)
    return "\n".join(["```", f"$ megatrain plan {name} {' '.join(words)} --machine {machine}", *shown, "```"])


def page() -> str:
    """The page with every block made anew."""
    return BLOCK.sub(lambda found: found.group(1) + block(found.group(2)), PAGE.read_text("utf-8"))


def main(argv: Sequence[str]) -> int:
    """Print or write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench planning")
    parser.add_argument("--write", action="store_true", help="write docs/planning.md")
    made = page()
    if parser.parse_args(argv).write:
        PAGE.write_text(made, "utf-8")
    else:
        print(made, end="")
    return 0

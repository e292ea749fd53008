"""Predicted against measured: every step of `bench/results` on the H200, within a tenth. New lines are picked up."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.presets import PRESETS
from bench.results import RESULTS
from bench.step import load_config, make_plan, parse, placed
from megatrain.hardware.described import read_machine
from megatrain.models.layout import layout_of
from megatrain.models.spec_of import model_spec
from megatrain.planner import Prediction, Workload, predict
from megatrain.planner.sizes import Shapes

H200 = RESULTS / "NVIDIA-H200-Intel-Xeon-16-cores.jsonl"
TOLERANCE = 0.10


def measured_steps(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [r for r in rows if r["bench"] == "step" and r["system"] == "megatrain" and r["model"] in PRESETS]


STEPS = measured_steps(H200)


def predicted(row: Mapping[str, Any]) -> Prediction:
    """What the planner says of a measured setting; the command has what the line leaves out."""
    args = placed(parse(shlex.split(row["command"])[4:]), "")
    placement = {key: row[key] for key in vars(placed(args, "")) if isinstance(row.get(key), str) and key != "model"}
    args = SimpleNamespace(**vars(args) | placement)
    spec = model_spec(load_config(args))  # type: ignore[arg-type]
    plan = make_plan(SimpleNamespace(spec=spec), args, row["micro_batches"])  # type: ignore[arg-type]
    layouts = {segment.name: layout_of(segment) for segment in spec.segments}
    shapes = Shapes(spec, layouts, 2, args.micro_batch_tokens, args.loss_chunk, not args.eager)
    rates = read_machine("h200-125gb").rates
    return predict(Workload(shapes, rates, row["micro_batches"], args.seq, on_cpu=False), plan)


@pytest.mark.parametrize("row", STEPS, ids=lambda row: f"{row['run']}-{row.get('resident') or 'ram'}")
def test_a_predicted_step_is_the_measured_one(row: Mapping[str, Any]) -> None:
    made = predicted(row)
    lanes = {str(lane): round(s, 3) for lane, s in made.lanes_s.items()}
    ratio = made.step_s / row["step_s"]
    assert abs(ratio - 1) < TOLERANCE, f"{made.step_s:.3f} s predicted {lanes}, {row['step_s']:.3f} s {row['lanes']}"


def test_there_is_something_to_hold_the_model_against() -> None:
    assert len(STEPS) >= 3


@pytest.mark.parametrize("row", STEPS, ids=lambda row: f"{row['run']}-{row.get('resident') or 'ram'}")
def test_the_busiest_lane_is_the_measured_one_and_about_as_busy(row: Mapping[str, Any]) -> None:
    made = predicted(row)
    busiest = max(made.lanes_s, key=made.lanes_s.__getitem__)
    assert str(busiest) == max(row["lanes"], key=row["lanes"].__getitem__)
    assert made.lanes_s[busiest] == pytest.approx(row["lanes"][str(busiest)], rel=TOLERANCE)

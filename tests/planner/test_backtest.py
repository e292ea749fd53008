"""Predicted against measured: every step of `bench/results` on the H200, within a tenth. New lines are picked up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bench.plan_again import again, recorded
from bench.planning import H200, PAGE, alone, backtest, measured_steps, predicted
from megatrain.planner.sizes import (
    backward_working_bytes,
    embedding_working_bytes,
    head_working_bytes,
    program_ram_bytes,
)

TOLERANCE = 0.10
STEPS = measured_steps()


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
    # reads and writes share a drive, each as long as the other lets it: no lane's seconds are its own
    lanes_s = {lane: s for lane, s in made.lanes_s.items() if not row.get("state_disk") or str(lane) == "compute"}
    busiest = max(lanes_s, key=lanes_s.__getitem__)
    seen_s = {lane: row["lanes"].get(str(lane), 0.0) for lane in lanes_s}
    assert busiest == max(seen_s, key=seen_s.__getitem__)
    assert made.lanes_s[busiest] == pytest.approx(row["lanes"][str(busiest)], rel=TOLERANCE)


def test_the_page_shows_every_measured_step() -> None:
    lines = list(backtest())
    assert len(lines) == 2 + len(STEPS)
    assert "\n".join(lines) in PAGE.read_text("utf-8"), "run: python -m bench planning --write"


ALONE = [row for row in recorded(H200)[0] if alone(row)]


@pytest.mark.parametrize("row", ALONE, ids=lambda row: f"{row['run']}-{row['setting']}")
def test_what_the_planner_chose_was_predicted(row: Mapping[str, Any]) -> None:
    """Of settings measured in a process of their own: seconds to a tenth, bytes to 2 % and never too few. Where no more
    than the program is in RAM, what it takes depends by 0.2 GB on which kernels were found compiled."""
    made = again(row)
    assert abs(made.step_ratio - 1) < TOLERANCE
    assert 1.0 <= made.bytes_ratio("hbm") <= 1.02
    program = program_ram_bytes(made.question.shapes, "cuda")
    assert made.bytes_ratio("ram") >= 1.0
    assert made.bytes_ratio("ram") <= 1.02 or made.table.total_bytes("ram") == program <= row["peak_ram_bytes"] + 2e8


@pytest.mark.parametrize("row", ALONE, ids=lambda row: f"{row['run']}-{row['setting']}")
def test_working_memory_is_what_was_seen(row: Mapping[str, Any]) -> None:
    """Each kind of op by itself, so that no error hides another."""
    made, seen = again(row), row["working_bytes"]
    shapes = made.question.shapes
    is_kept = all(block.activations == "keep" for block in made.plan.blocks)
    backward = max(backward_working_bytes(shapes, block.name, is_kept) for block in made.plan.blocks)
    assert head_working_bytes(shapes) == pytest.approx(seen["HEAD"][0], rel=1e-4)
    assert embedding_working_bytes(shapes) == pytest.approx(seen["EMBED_BACKWARD"][0], rel=3e-3)
    assert backward == pytest.approx(seen["BACKWARD"][0], rel=6e-3 if shapes.expert_share else 1e-4)


def test_enough_was_measured() -> None:
    assert len({row["setting"] for row in ALONE}) >= 17
    assert len({row["setting"] for row in ALONE if "before" not in row}) >= 16

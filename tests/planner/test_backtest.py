"""Predicted against measured: every step of `bench/results` on the H200, within a tenth. New lines are picked up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bench.planning import PAGE, backtest, measured_steps, predicted

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
    assert str(busiest) == max(row["lanes"], key=row["lanes"].__getitem__)
    assert made.lanes_s[busiest] == pytest.approx(row["lanes"][str(busiest)], rel=TOLERANCE)


def test_the_page_shows_every_measured_step() -> None:
    lines = list(backtest())
    assert len(lines) == 2 + len(STEPS)
    assert "\n".join(lines) in PAGE.read_text("utf-8"), "run: python -m bench planning --write"

"""Figures of the memory table and the price, as text."""

from __future__ import annotations

import pytest

from megatrain.planner.table import clock, decimal, figure


@pytest.mark.parametrize(
    ("value", "text"),
    [(1471.987, "1,472"), (999.7, "1,000"), (113.6, "114"), (16.24, "16.2"), (1.4684, "1.47"), (0.14182, "0.142"),
     (0.004561, "0.00456"), (0.0, "0")],
)  # fmt: skip
def test_a_small_figure_is_not_rounded_to_nothing(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (283e6, "283 MB"), (8.0823e9, "8.08 GB"), (600e12, "600 TB"),
     (1.61660764e18, "1,616,608 TB")],
)  # fmt: skip
def test_what_is_written_is_said_in_the_units_of_drives(num_bytes: float, text: str) -> None:
    assert decimal(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (59.6, "0:01:00"), (3661, "1:01:01"), (90000, "1 d 1:00:00"), (1e13, "115,740,740 d 17:46:40")],
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text

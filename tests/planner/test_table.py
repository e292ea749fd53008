"""Figures of the memory table and the price, as text."""

from __future__ import annotations

import pytest

from megatrain.planner.table import figure


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [(1471.987, 2, "1471.99"), (113.6, 0, "114"), (1.4684, 3, "1.468"), (0.161, 3, "0.161"), (0.14182, 0, "0.142"),
     (0.004561, 2, "0.00456"), (0.0, 2, "0")],
)  # fmt: skip
def test_a_small_figure_is_not_rounded_to_nothing(value: float, decimals: int, text: str) -> None:
    assert figure(value, decimals) == text

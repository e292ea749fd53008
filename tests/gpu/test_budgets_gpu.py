"""On a GPU: the plans that are chosen for many budgets give the plain loop's bits."""

from __future__ import annotations

import pytest

from tests.engine.test_budgets import every_plan_gives_the_plain_loops_bits


@pytest.mark.gpu
def test_no_budget_changes_a_bit_on_a_gpu() -> None:
    every_plan_gives_the_plain_loops_bits("cuda", "bf16")

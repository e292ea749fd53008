"""A line of `python -m bench plans`, predicted again by today's planner: its plan, on its machine, at its rates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bench.plan_settings import Setting
from megatrain.config import resolved
from megatrain.hardware import Machine
from megatrain.hardware.rates import Rates
from megatrain.models.spec_of import model_spec
from megatrain.planner import Prediction, Question, memory_table, predict, question_of
from megatrain.planner.sizes import unused_pool_bytes
from megatrain.planner.table import MemoryTable
from megatrain.schedule.plan import Plan, Tier

RESOLVED = (
    "precision",
    "micro_batch_tokens",
    "loss_chunk_tokens",
    "compile",
    "deterministic",
)  # what sizes follow from


@dataclass(frozen=True)
class Again:
    """A measured line (`row`) beside what is said of it today."""

    row: Mapping[str, Any]
    question: Question
    plan: Plan
    table: MemoryTable
    prediction: Prediction

    @property
    def step_ratio(self) -> float:
        """Predicted / measured."""
        return self.prediction.step_s / self.row["step_s"]

    def compared_bytes(self, tier: Tier) -> tuple[int, int]:
        """(Measured, predicted) peak in "hbm" or "ram"; in HBM, of a line from `before` its pool was put in order, of
        all but what the pool had no use for."""
        seen, said = self.row[f"peak_{tier}_bytes"], self.table.total_bytes(tier)
        if tier == "hbm" and self.was_before:
            used = self.row["outside_pool_bytes"]["end"] + self.row["peak_allocated_bytes"]
            return used, said - unused_pool_bytes(self.question.shapes)
        return seen, said

    @property
    def was_before(self) -> bool:
        """Whether the line says what the program did otherwise when it was measured."""
        return "before" in self.row

    def bytes_ratio(self, tier: Tier) -> float:
        """Predicted / measured."""
        seen, said = self.compared_bytes(tier)
        return said / seen


def recorded(path: Path) -> tuple[list[Mapping[str, Any]], int]:
    """(Measured lines that hold their whole plan, how many measured ones do not)."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    measured = [r for r in lines if r["bench"] == "plans" and r["system"] == "megatrain" and "step_s" in r]
    whole = [row for row in measured if "made_of" in row]
    return whole, len(measured) - len(whole)


def setting_of(row: Mapping[str, Any]) -> Setting:
    """What the line's setting asked for."""
    return Setting(
        row["setting"], row["model"], row["layers"], row["seq_tokens"], row["step_tokens"], row["memory"],
        row["micro_batch_tokens"], row["fields"],
    )  # fmt: skip


def again(row: Mapping[str, Any]) -> Again:
    """The line's own plan, priced by today's account and cost model."""
    made, setting = row["made_of"], setting_of(row)
    machine, rates, plan = (
        _adapter(kind).validate_python(made[kind.__name__.lower()]) for kind in (Machine, Rates, Plan)
    )
    config = resolved(setting.run_config("model", "run"), machine.device, machine.num_cores)
    question = question_of(model_spec(setting.model_config()), config.model_copy(update=made["config"]), machine, rates)
    return Again(row, question, plan, memory_table(question, plan), predict(question.work, plan))


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

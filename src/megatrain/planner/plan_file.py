"""Plan files: a plan.json that a person may edit, read back and held against the model. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megatrain.errors import PlanError
from megatrain.models.layout import embedding_of
from megatrain.models.spec import ModelSpec
from megatrain.planner.sizes import refuse_unkept
from megatrain.schedule.plan import Plan, SegmentPlan, validate

_ADAPTER = TypeAdapter(Plan)


def read_plan(path: Path, spec: ModelSpec) -> Plan:
    """The plan of a plan.json (of `megatrain plan --json`, of a run folder, or its "plan" alone), valid for `spec`."""
    try:
        table = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PlanError(f"--plan: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise PlanError(f"--plan: {path} is no JSON: {error}") from None
    table = table.get("plan", table) if isinstance(table, dict) else table
    try:
        _refuse_unknown(path, table)
        plan = _ADAPTER.validate_python(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PlanError(f"--plan: {path}: {where} is {first['input']!r}: {first['msg']}") from None
    validate(plan)
    _refuse_other_model(path, plan, spec)
    refuse_unkept(spec, plan)
    return plan


def _refuse_unknown(path: Path, table: object) -> None:
    """A key that nobody reads would be a wish that is not honoured."""
    if not isinstance(table, Mapping):
        return
    parts = [(table, Plan)] + [
        (segment, SegmentPlan) for segment in table.get("segments", ()) if isinstance(segment, Mapping)
    ]
    for part, kind in parts:
        known = [field.name for field in fields(kind)]
        for key in part:
            if key not in known:
                raise PlanError(f"--plan: {path}: unknown key {key!r}; {kind.__name__} has {', '.join(known)}")


def _refuse_other_model(path: Path, plan: Plan, spec: ModelSpec) -> None:
    names = [segment.name for segment in spec.segments]
    if [segment.name for segment in plan.segments] != names:
        raise PlanError(
            f"--plan: {path} is for {len(plan.blocks)} blocks, the model has {len(spec.blocks)}; plan this model anew"
        )
    facts = {"tied": (plan.tied, spec.tied)}
    facts["embedding_trainable"] = (plan.embedding_trainable, embedding_of(spec).trainable)
    for key, (said, true) in facts.items():
        if said != true:
            raise PlanError(f"--plan: {path} says {key} is {said}, the model's is {true}; plan this model anew")
    for planned, segment in zip(plan.segments, spec.segments, strict=True):
        trainable = any(tensor.trainable for tensor in segment.tensors)
        if planned.trainable != trainable:
            raise PlanError(
                f"--plan: {path}: trainable of {planned.name} is {planned.trainable}, the config makes it {trainable}; "
                "freeze decides that: plan with this config anew"
            )

"""Plan files: a plan.json that a person may edit, read back and held against the model and the config. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from megatrain.config import resolved
from megatrain.errors import ConfigError, PlanError
from megatrain.models.layout import embedding_of
from megatrain.models.spec import ModelSpec
from megatrain.planner.account import Question
from megatrain.planner.sizes import refuse_unkept
from megatrain.schedule.plan import Activations, Plan, validate
from megatrain.strict_json import typed

# The config's word on activations -> what a block may then do.
HONOURS = {"auto": get_args(Activations), "recompute": ("recompute", "offload"), "keep": ("keep",)}


def read_plan(path: Path, question: Question) -> Plan:
    """The plan of a plan.json (of `megatrain plan --json`, of a run folder, or its "plan" alone), one that answers
    `question`: of its model, and with every wish of its config."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"--plan: {path} cannot be read: {error.strerror}") from None
    plan = typed(Plan, data, f"--plan: {path}", PlanError, "`megatrain plan --json` writes such a file", "plan")
    try:
        validate(plan)
    except PlanError as error:
        raise PlanError(f"--plan: {path}: {error}") from None
    _refuse_other_model(path, plan, question.shapes.spec)
    refuse_unkept(question.shapes.spec, plan)
    _refuse_contradictions(path, plan, question)
    return plan


def _refuse_contradictions(path: Path, plan: Plan, question: Question) -> None:
    """What the planner would never choose for this config. What the config leaves open is the plan's to say."""
    config, machine, most = question.config, question.machine, question.num_micro_batches
    wishes: list[tuple[str, object, object]] = [("clip_mode", config.clip_mode, plan.clip_mode)]
    wishes.append(("weight_slots", config.weight_slots, plan.weight_slots))
    if min(config.round_micro_batches or most, most) != min(plan.round_micro_batches, most):
        wishes.append(("round_micro_batches", config.round_micro_batches, plan.round_micro_batches))
    others = [block for block in plan.blocks if block.activations not in HONOURS[config.activations]]
    wishes += [("activations", config.activations, f"{block.activations} of {block.name}") for block in others]
    for key, asked, found in wishes:
        if asked not in (None, "auto", found):
            raise PlanError(
                f"--plan: {path} has {key} {found}, the config asks for {asked}; change one of them, or leave {key} "
                "out of the config"
            )
    try:
        resolved(config.model_copy(update={"clip_mode": plan.clip_mode}), machine.device, machine.num_cores)
    except ConfigError as error:
        raise PlanError(f"--plan: {path}: {error}") from None
    if plan.clip_mode == "two-pass" and plan.round_micro_batches < most:
        raise PlanError(
            f"--plan: {path} has round_micro_batches {plan.round_micro_batches}, but two passes take the {most} "
            f"micro-batches of a step in one round; set it to {most}, or clip_mode to deferred"
        )


def _refuse_other_model(path: Path, plan: Plan, spec: ModelSpec) -> None:
    names = [segment.name for segment in spec.segments]
    if [segment.name for segment in plan.segments] != names:
        raise PlanError(
            f"--plan: {path} is for {len(plan.blocks)} blocks, the model has {len(spec.blocks)}; plan this model anew"
        )
    facts = {"tied": (plan.tied, spec.tied)}
    facts["embedding_trainable"] = (plan.embedding_trainable, embedding_of(spec).trainable)
    for planned, segment in zip(plan.segments, spec.segments, strict=True):
        trained = any(tensor.trainable for tensor in segment.tensors)
        facts[f"trainable of {segment.name}"] = (planned.trainable, trained)
    for key, (said, true) in facts.items():
        if said != true:
            raise PlanError(f"--plan: {path} says {key} is {said}, for this model and config it is {true}; plan anew")

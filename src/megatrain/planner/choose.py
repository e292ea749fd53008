"""Chooses a Plan: streams everything, then moves what fits into HBM, most useful first. No torch, no search yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megatrain.config import RunConfig
from megatrain.config_values import format_size
from megatrain.errors import PlanError
from megatrain.hardware import Machine
from megatrain.models.layout import embedding_of, layout_of
from megatrain.models.spec import ModelSpec
from megatrain.planner import sizes
from megatrain.planner.sizes import Shapes, resolved_tokens, shapes_of
from megatrain.planner.table import TIERS, MemoryRow, MemoryTable, gib
from megatrain.schedule.plan import Plan, SegmentPlan, Tier


@dataclass(frozen=True)
class _Question:
    """What a plan is chosen for. `machine_tier`: where slots are, hbm on a GPU, ram on a CPU."""

    shapes: Shapes
    config: RunConfig
    machine: Machine
    num_micro_batches: int

    @property
    def machine_tier(self) -> Tier:
        return "hbm" if self.machine.device == "cuda" else "ram"


def plan_run(spec: ModelSpec, config: RunConfig, machine: Machine) -> tuple[Plan, MemoryTable]:
    """The Plan of a resolved config and its memory table. A NO in the table is for `refuse_misfit` to raise."""
    layouts = {segment.name: layout_of(segment) for segment in spec.segments}
    shapes = shapes_of(spec, layouts, config)
    rows_per_micro_batch = shapes.micro_batch_tokens // config.max_length
    question = _Question(shapes, config, machine, -(-config.train_batch_size // rows_per_micro_batch))
    plan = _choose(question)
    return plan, memory_table(question, plan)


def refuse_misfit(spec: ModelSpec, config: RunConfig, machine: Machine, table: MemoryTable) -> None:
    """PlanError with what `misfit` says, if `table` says NO."""
    reason = misfit(spec, config, machine, table)
    if reason is not None:
        raise PlanError(reason)


def misfit(spec: ModelSpec, config: RunConfig, machine: Machine, table: MemoryTable) -> str | None:
    """What does not fit, the smallest budget that would do and the nearest changes that fit; None if all fits."""
    for tier in TIERS:
        if table.verdict(tier) != "NO":
            continue
        need, budget = table.total_bytes(tier), table.budgets[tier]
        fitting: dict[str, str] = {}  # the nearest value of each key
        for text, changed in _changes(config):
            if plan_run(spec, changed, machine)[1].overall != "NO":
                fitting.setdefault(text.partition(":")[0], text)
        remedy = f"; these changes would fit: {', or '.join(fitting.values())}" if fitting else ""
        enough = format_size(-(-need // sizes.MIB) * sizes.MIB)
        all_there_is = " (all that is free)" if budget == _free_bytes(machine)[tier] else ""  # no key can raise it
        return (
            f"the run needs {gib(need)} of {tier}, the budget is {gib(budget)}{all_there_is}; "
            f"the smallest budget that would do is memory.{tier}: {enough}{remedy}"
        )
    return None


def _changes(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Small changes a person might accept, each alone, nearest first."""
    tokens, chunk = resolved_tokens(config)
    for value in _halves(tokens, config.max_length):
        update = {"micro_batch_tokens": value, "loss_chunk_tokens": min(chunk, value)}
        yield f"micro_batch_tokens: {value}", config.model_copy(update=update)
    for value in _halves(chunk, 64):
        yield f"loss_chunk_tokens: {value}", config.model_copy(update={"loss_chunk_tokens": value})
    for value in _halves(config.max_length, 64):
        update = {"max_length": value, "micro_batch_tokens": value, "loss_chunk_tokens": min(chunk, value)}
        yield f"max_length and micro_batch_tokens: {value}", config.model_copy(update=update)
    if config.activations == "keep":
        yield "activations: recompute", config.model_copy(update={"activations": "recompute"})
    if config.round_micro_batches is not None:
        yield "round_micro_batches: 1", config.model_copy(update={"round_micro_batches": 1})
    if config.save_strategy != "no" and config.save_total_limit > 2:
        yield "save_total_limit: 2", config.model_copy(update={"save_total_limit": 2})


def _halves(value: int, least: int) -> Iterator[int]:
    """value / 2, value / 4 … down to `least`."""
    while (value := value // 2) >= least:
        yield value


def _streamed(question: _Question, round_micro_batches: int, activations: Literal["recompute", "keep"]) -> Plan:
    """Everything in RAM, blocks through shared slots: the plan that needs least HBM."""
    segments = []
    for segment in question.shapes.spec.segments:
        trainable = any(tensor.trainable for tensor in segment.tensors)
        if segment.kind == "block":
            segments.append(SegmentPlan(segment.name, "block", trainable, activations=activations))
        else:
            segments.append(SegmentPlan(segment.name, segment.kind, trainable, weights="own", grads="own"))
    return Plan(
        segments=tuple(segments),
        tied=question.shapes.spec.tied,
        weight_slots=question.config.weight_slots or 2,
        grad_slots=2,
        round_micro_batches=round_micro_batches,
        embedding_trainable=embedding_of(question.shapes.spec).trainable,
    )


def _choose(question: _Question) -> Plan:
    """The fewest rounds that fit, then every upgrade that still fits, in the order of `_upgrades`."""
    config = question.config
    activations: Literal["recompute", "keep"] = "keep" if config.activations == "keep" else "recompute"
    if config.round_micro_batches is not None:
        plan = _streamed(question, min(config.round_micro_batches, question.num_micro_batches), activations)
    else:
        plan = _fewest_rounds(question, activations)
    if _fits(question, plan):
        for segment, update in _upgrades(question, plan):
            better = _with_segment(plan, segment, update)
            if _fits(question, better):
                plan = better
    return plan


def _fewest_rounds(question: _Question, activations: Literal["recompute", "keep"]) -> Plan:
    """Rounds of equal size, as few as fit; one micro-batch a round if nothing fits."""
    for num_rounds in range(1, question.num_micro_batches + 1):
        size = -(-question.num_micro_batches // num_rounds)
        plan = _streamed(question, size, activations)
        if size == 1 or _fits(question, plan):
            return plan
    raise AssertionError("a step has at least one micro-batch")


def _upgrades(question: _Question, plan: Plan) -> Iterator[tuple[str, Mapping[str, str]]]:
    """(segment, changed fields), most useful first.

    In the order in which updates are needed: EMBED, whose gradient is also complete last, the blocks from the front,
    HEAD. Then kept activations, last block first: they live shortest. Update "device" is never chosen: it takes as much
    HBM as state "hbm", and RAM and traffic besides.
    """
    own = {"state": "hbm", "weights": "own", "grads": "own"}
    if question.machine.device == "cuda":
        for segment in plan.segments:
            yield segment.name, own
    if question.config.activations == "auto":
        for block in reversed(plan.blocks):
            yield block.name, {"activations": "keep"}


def _with_segment(plan: Plan, name: str, update: Mapping[str, str]) -> Plan:
    segments = tuple(replace(s, **update) if s.name == name else s for s in plan.segments)  # type: ignore[arg-type]
    return replace(plan, segments=segments)


def _fits(question: _Question, plan: Plan) -> bool:
    """Whether every tier holds the plan with a twentieth to spare: upgrades must not make a run tight."""
    return memory_table(question, plan).overall == "FITS"


def memory_table(question: _Question, plan: Plan) -> MemoryTable:
    """Every row of the table, for this plan."""
    shapes, device_tier = question.shapes, question.machine_tier
    weight_pool, grad_pool = sizes.pool_bytes(shapes, plan)
    kept = sum(
        plan.round_micro_batches * sizes.saved_bytes(shapes, spec)
        for spec, block in zip(shapes.spec.blocks, plan.blocks, strict=True)
        if block.activations == "keep"
    )
    working = {
        "backward of a block": sizes.block_working_bytes(shapes),
        "head and loss": sizes.head_working_bytes(shapes),
    }
    peak = max(working, key=lambda phase: working[phase])
    own = {s.name: sizes.segment_hbm_bytes(shapes, s) for s in plan.segments}
    rows = [
        *_home_rows(shapes, plan),
        MemoryRow(
            "slots and homes of EMBED and HEAD", device_tier, own[plan.segments[0].name] + own[plan.segments[-1].name]
        ),
        MemoryRow("homes of resident blocks", device_tier, sum(own[block.name] for block in plan.blocks)),
        MemoryRow("shared weight slots", device_tier, weight_pool),
        MemoryRow("shared gradient slots", device_tier, grad_pool),
        MemoryRow("second gradient of the tied embedding", device_tier, sizes.tied_gradient_bytes(shapes, plan)),
        MemoryRow("boundary activations of a round", device_tier, sizes.boundary_bytes(shapes, plan)),
        MemoryRow("kept activations of a round", device_tier, kept),
        MemoryRow(f"working memory ({peak})", device_tier, working[peak]),
        MemoryRow("program and libraries", "ram", sizes.PROGRAM_RAM_BYTES[question.machine.device]),
    ]
    if question.machine.device == "cuda":
        rows.append(MemoryRow("CUDA libraries", "hbm", sizes.CONTEXT_HBM_BYTES))
    if question.config.save_strategy != "no":
        rows.append(MemoryRow("checkpoint writer", "ram", sizes.SAVE_BUFFER_BYTES))
        copies = question.config.save_total_limit + 1  # the new one is whole before an old one goes
        copies += question.config.eval_dataset is not None  # the best one is kept besides
        rows.append(MemoryRow(f"checkpoints ({copies})", "disk", copies * sizes.checkpoint_bytes(shapes)))
    rows = [row for row in rows if row.num_bytes]
    return MemoryTable(tuple(rows), _budgets(question), peak, shapes.spec.num_parameters)


def _home_rows(shapes: Shapes, plan: Plan) -> list[MemoryRow]:
    """What the store holds in RAM."""
    names = [s.name for s in plan.segments if s.state == "ram"]
    drained = [s.name for s in plan.segments if not s.updates_on_device]
    return [
        MemoryRow("weights", "ram", sum(sizes.weights_bytes(shapes, name) for name in names)),
        MemoryRow("optimizer state", "ram", sum(sizes.state_bytes(shapes, name) for name in names)),
        MemoryRow("gradients", "ram", sum(sizes.gradient_bytes(shapes, name) for name in drained)),
    ]


def _free_bytes(machine: Machine) -> dict[Tier, int]:
    return {"hbm": machine.hbm_free_bytes, "ram": machine.ram_available_bytes, "disk": machine.disk_free_bytes}


def _budgets(question: _Question) -> dict[Tier, int]:
    """What each tier may hold: what the user allows, but never more than the machine has free."""
    memory, has = question.config.memory, _free_bytes(question.machine)
    asked: dict[Tier, int | None] = {"hbm": memory.hbm, "ram": memory.ram, "disk": memory.disk}
    budgets: dict[Tier, int] = {}
    for tier in TIERS:
        wish = asked[tier]
        budgets[tier] = has[tier] if wish is None else min(has[tier], wish)
    return budgets

"""Chooses a Plan, and says what would fit when nothing does. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.config import RunConfig
from megatrain.config_values import format_size
from megatrain.errors import PlanError
from megatrain.hardware import Machine
from megatrain.hardware.described import likely_rates
from megatrain.hardware.rates import Rates
from megatrain.models.spec import ModelSpec
from megatrain.planner import sizes
from megatrain.planner.account import free_bytes, memory_table, question_of
from megatrain.planner.family import search, smallest
from megatrain.planner.sizes import resolved_tokens
from megatrain.planner.table import TIERS, MemoryTable, gib
from megatrain.schedule.plan import Plan


def plan_run(
    spec: ModelSpec, config: RunConfig, machine: Machine, rates: Rates | None = None
) -> tuple[Plan, MemoryTable]:
    """The Plan of a resolved config and its memory table. A NO in the table is for `refuse_misfit` to raise.

    `rates`: as measured; None: those of a machine with such a device.
    """
    question = question_of(spec, config, machine, rates or likely_rates(machine))
    plan = search(question)
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
            if _could_fit(spec, changed, machine):
                fitting.setdefault(text.partition(":")[0], text)
        remedy = f"; these changes would fit: {', or '.join(fitting.values())}" if fitting else ""
        enough = format_size(-(-need // sizes.MIB) * sizes.MIB)
        all_there_is = " (all that is free)" if budget == free_bytes(machine)[tier] else ""  # no key can raise it
        way = f"the smallest budget that would do is memory.{tier}: {enough}"
        if tier == "disk" and all_there_is:
            way = f"free {gib(need - budget)} more, or choose an output_dir on another disk"
        return f"the run needs {gib(need)} of {tier}, the budget is {gib(budget)}{all_there_is}; {way}{remedy}"
    return None


def _could_fit(spec: ModelSpec, config: RunConfig, machine: Machine) -> bool:
    question = question_of(spec, config, machine, likely_rates(machine))
    return memory_table(question, smallest(question)).overall != "NO"


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
    if config.ema_decay is not None:
        yield "ema_decay: null", config.model_copy(update={"ema_decay": None})
    if config.save_strategy != "no":
        yield "save_strategy: no (nothing to resume from)", config.model_copy(update={"save_strategy": "no"})


def _halves(value: int, least: int) -> Iterator[int]:
    """value / 2, value / 4 … down to `least`."""
    while (value := value // 2) >= least:
        yield value

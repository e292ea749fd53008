"""What a person could choose instead of a plan that cannot be run: budgets, machines, small changes. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatrain.config import RunConfig
from megatrain.config_values import Memory, format_size
from megatrain.errors import PlanError
from megatrain.hardware import Machine
from megatrain.hardware.described import likely_rates
from megatrain.models.spec import ModelSpec
from megatrain.planner import sizes
from megatrain.planner.account import FREE, Question, free_bytes, kept_checkpoints, memory_table, question_of
from megatrain.planner.cheapest import search
from megatrain.planner.family import could_fit, least_bytes
from megatrain.planner.price import wear_misfit
from megatrain.planner.sizes import resolved_tokens
from megatrain.planner.table import TIERS, MemoryTable, gib
from megatrain.schedule.plan import Plan, Tier

Change = tuple[str, RunConfig]  # what a person would write, and the config with it
ENDLESS_BYTES = 1 << 60  # of a tier that is asked what it would have to hold
# (micro-batch, segment) pairs of a step, whose schedule has two ops for each: a quarter of these took 13 s of one core
# and 315 MB to build. With 120 blocks and 16,384 tokens a micro-batch they are 70 million tokens a step.
MOST_VISITS = 1 << 19


def refuse_endless(question: Question) -> None:
    """PlanError if a step has more micro-batches than a schedule of it can be made for."""
    config, most = question.config, _most_micro_batches(question)
    if question.num_micro_batches <= most:
        return
    tokens = question.shapes.micro_batch_tokens
    raise PlanError(
        f"train_batch_size is {config.train_batch_size:,}: with rows of {config.max_length:,} tokens and "
        f"micro_batch_tokens {tokens:,} a step has {question.num_micro_batches:,} micro-batches, and of this model it "
        f"may have {most:,}; set train_batch_size to at most {most * (tokens // config.max_length)}, or raise "
        "micro_batch_tokens"
    )


def _most_micro_batches(question: Question) -> int:
    return MOST_VISITS // len(question.shapes.spec.segments)


def refuse_misfit(question: Question, plan: Plan, steps: range | None = None, plan_file: Path | None = None) -> None:
    """PlanError with what `misfit` says, if it says anything."""
    reason = misfit(question, plan, steps, plan_file)
    if reason is not None:
        raise PlanError(reason)


def misfit(question: Question, plan: Plan, steps: range | None = None, plan_file: Path | None = None) -> str | None:
    """Why `plan` cannot be run; None if it can: what does not fit, the smallest budget that would do and the nearest
    changes that fit; or that `steps`, those to come by index, write more to the disk than they may. None: unknown.

    `plan_file`: where `plan` was read from; advice is about that plan, and what leaving it to the planner would do.
    """
    table = memory_table(question, plan)
    short: list[Tier] = [tier for tier in TIERS if table.verdict(tier) == "NO"]
    reason = _shortage(question, table, short[0], plan_file is None) if short else wear_misfit(question, plan, steps)
    if reason is None or plan_file is None:
        return reason
    own = misfit(question, search(question), steps) or "the planner's own plan fits"
    return f"by --plan {plan_file} {reason}; or leave --plan out: {own}"


def _shortage(question: Question, table: MemoryTable, tier: Tier, is_chosen: bool) -> str:
    spec, config, machine = question.shapes.spec, question.config, question.machine
    need, budget = table.total_bytes(tier), table.budgets[tier]
    all_there_is = " (all that is free)" if budget == free_bytes(machine)[tier] else ""
    what = f"the run needs {gib(need)} of {tier}, the budget is {gib(budget)}{all_there_is}"
    if not is_chosen:  # what another plan would take, or take less of, changes nothing
        return f"{what}; {_more_room(tier, need, machine) or 'let less of it live there'}"
    fitting = [text for values in _changes(config) for text in _nearest(spec, values, machine)]
    disk_bytes = None if tier == "disk" else _least(spec, config, machine, "disk")
    fitting += [] if disk_bytes is None else [_on_disk(disk_bytes, config, machine)]
    remedy = f"; these changes would fit: {', or '.join(fitting)}" if fitting else ""
    enough = _least(spec, config, machine, tier)
    beside = _beside(spec, config, machine, tier, table.budgets) if enough is None else None
    if beside is not None:
        return f"{what}; {beside}{remedy}"
    way = _more_room(tier, enough, machine) if enough is not None else None
    return f"{what}; {way or _another_machine(spec, config, machine, enough or need)}{remedy}"


def _beside(
    spec: ModelSpec, config: RunConfig, machine: Machine, tier: Tier, budgets: Mapping[Tier, int]
) -> str | None:
    """What would do of `tier`, of which there is as much here, and of another one, where no more of `tier` would do
    alone; None if not even two would."""
    for other in TIERS:
        if other == tier or (other == "hbm" and machine.device == "cpu"):
            continue
        enough = _least(spec, *_given(config, machine, other, ENDLESS_BYTES), tier)
        if enough is None or not budgets[tier] < enough <= free_bytes(machine)[tier]:
            continue
        beside = _least(spec, *_given(config, machine, tier, enough), other)
        if beside is not None:
            return (
                f"more of {tier} alone would not do: it takes {_budget(enough)} of {tier} and {_budget(beside)} of "
                f"{other}, whose budget is {gib(budgets[other])}"
            )
    return None


def _given(config: RunConfig, machine: Machine, tier: Tier, num_bytes: int) -> tuple[RunConfig, Machine]:
    """A machine with so many bytes of `tier` free, and all of them for the run."""
    memory = config.memory.model_copy(update={tier: None})
    return config.model_copy(update={"memory": memory}), replace(machine, **{FREE[tier]: num_bytes})


def _more_room(tier: Tier, need: int, machine: Machine) -> str | None:
    """Where the bytes of `need` can come from: out of a budget, if that many are free; no key makes more of them.

    None: the GPU, or the machine, has not so many.
    """
    free = free_bytes(machine)[tier]
    if need <= free:
        return f"the smallest budget that would do is memory.{tier}: {_budget(need)}"
    if tier == "disk":
        return f"free {gib(need - free)} more, or choose an output_dir on another disk"
    total = machine.hbm_total_bytes if tier == "hbm" else machine.ram_total_bytes
    if need > total:
        return None
    if tier == "hbm":
        return f"free {gib(need - free)} more: nvidia-smi shows what else uses the GPU"
    return f"free {gib(need - free)} more: end other programs, or raise the memory limit of the container"


def _another_machine(spec: ModelSpec, config: RunConfig, machine: Machine, need: int) -> str:
    """What to run on instead, with a disk that has room for checkpoints: these, no RAM takes. On a GPU: as much HBM as
    slots take, the rest from RAM. `need`: what is named where this machine has as much."""
    unbound = config.model_copy(update={"memory": Memory()})
    asked = question_of(spec, config, machine, likely_rates(machine))
    kept_bytes = kept_checkpoints(asked) * asked.shapes.checkpoint_bytes
    machine = replace(machine, disk_free_bytes=max(kept_bytes, machine.disk_free_bytes))
    if machine.device == "cpu":
        return f"take a machine that has {gib(_least(spec, unbound, machine, 'ram') or need)} free"
    endless = replace(machine, ram_available_bytes=ENDLESS_BYTES, disk_free_bytes=ENDLESS_BYTES)
    hbm_bytes = _least(spec, unbound, endless, "hbm")
    assert hbm_bytes is not None, "RAM and disk are endless"
    gpu = replace(machine, hbm_free_bytes=max(hbm_bytes, machine.hbm_free_bytes))
    ram_bytes = _least(spec, unbound, gpu, "ram")
    parts = [f"a GPU that has {gib(hbm_bytes)} free"] if hbm_bytes > machine.hbm_free_bytes else []
    if ram_bytes is not None and ram_bytes > machine.ram_available_bytes:
        parts.append(f"a machine with {gib(ram_bytes)} of RAM available")
    return f"take {' in '.join(parts) or f'another, with room for {gib(need)}'}"


def _least(spec: ModelSpec, config: RunConfig, machine: Machine, tier: Tier) -> int | None:
    """What of `tier` would do, if the others keep to their budgets; None if nothing would."""
    if tier != "ram":
        return least_bytes(question_of(spec, config, machine, likely_rates(machine)), tier)

    def with_ram(num_bytes: int) -> Question:
        return question_of(spec, *_given(config, machine, "ram", num_bytes), likely_rates(machine))

    # What goes to the disk, so that there is something to spare of RAM, follows from how much there is of it.
    most = least_bytes(with_ram(ENDLESS_BYTES), "ram")
    enough = range(0, 0 if most is None else most * 11 // 10, sizes.MIB)
    return None if most is None else enough[bisect_left(enough, True, key=lambda tried: could_fit(with_ram(tried)))]


def _budget(num_bytes: int) -> str:
    """The smallest budget of whole MiB that holds so many bytes, as a config spells it."""
    return format_size(-(-num_bytes // sizes.MIB) * sizes.MIB)


def _on_disk(num_bytes: int, config: RunConfig, machine: Machine) -> str:
    if num_bytes <= machine.disk_free_bytes:
        return f"memory.disk: {_budget(num_bytes)}"
    budget = config.memory.disk
    more = f" and memory.disk: {_budget(num_bytes)}" if budget is not None and budget < num_bytes else ""
    return f"an output_dir on a disk with {gib(num_bytes)} free{more}"


def _nearest(spec: ModelSpec, values: Sequence[Change], machine: Machine) -> list[str]:
    """The first of `values`, which ask for less and less, that fits; nothing if the last one does not."""
    if not values or not _could_fit(spec, values[-1][1], machine):
        return []
    return [next(text for text, changed in values if _could_fit(spec, changed, machine))]


def _could_fit(spec: ModelSpec, config: RunConfig, machine: Machine) -> bool:
    question = question_of(spec, config, machine, likely_rates(machine))
    return question.num_micro_batches <= _most_micro_batches(question) and could_fit(question)


def _changes(config: RunConfig) -> Iterator[list[Change]]:
    """Small changes a person might accept, each of one key alone, its nearest value first."""
    tokens, chunk = resolved_tokens(config)

    def changed(text: str, **update: object) -> Change:
        return text, config.model_copy(update=update)

    def micro(value: int) -> dict[str, object]:
        return {"micro_batch_tokens": value, "loss_chunk_tokens": min(chunk, value)}

    yield [changed(f"micro_batch_tokens: {v}", **micro(v)) for v in _halves(tokens, config.max_length)]
    yield [changed(f"loss_chunk_tokens: {v}", loss_chunk_tokens=v) for v in _halves(chunk, 64)]
    shorter = _halves(config.max_length, 64)
    yield [changed(f"max_length and micro_batch_tokens: {v}", max_length=v, **micro(v)) for v in shorter]
    yield [changed(f"train_batch_size: {v}", train_batch_size=v) for v in _halves(config.train_batch_size, 1)]
    if config.activations == "keep":
        yield [changed("activations: recompute", activations="recompute")]
    if config.round_micro_batches is not None:
        yield [changed("round_micro_batches: 1", round_micro_batches=1)]
    if config.clip_mode == "deferred" and config.deterministic:
        yield [changed("clip_mode: two-pass", clip_mode="two-pass")]
    if config.save_strategy != "no" and config.save_total_limit > 2:
        yield [changed("save_total_limit: 2", save_total_limit=2)]
    if config.ema_decay is not None:
        yield [changed("ema_decay: null", ema_decay=None)]
    if config.save_strategy != "no":
        yield [changed("save_strategy: no (nothing to resume from)", save_strategy="no")]


def _halves(value: int, least: int) -> Iterator[int]:
    """value / 2, value / 4 … down to `least`."""
    while (value := value // 2) >= least:
        yield value

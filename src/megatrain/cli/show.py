"""What the verbs print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from megatrain.cli.streams import visible
from megatrain.config import RunConfig, yaml_scalar
from megatrain.data import PreviewRow, Report
from megatrain.hardware import Machine
from megatrain.models.spec import ModelSpec
from megatrain.planner import MemoryTable
from megatrain.planner.account import free_bytes
from megatrain.planner.price import Price
from megatrain.planner.table import TIERS, clock, gib
from megatrain.schedule.plan import Plan


def config_lines(config: RunConfig) -> list[str]:
    """Every key that is not at its default, under our own name, and a line for the precision."""
    defaults = RunConfig(model="-", dataset="-").model_dump(mode="json")
    table = config.model_dump(mode="json")
    changed = [f"  {key}: {yaml_scalar(value)}" for key, value in table.items() if value != defaults[key]]
    masters = "hi (bf16, computes) + lo (int16)" if config.precision == "bf16" else "the compute weight itself"
    return [
        "config (all keys: config.yaml in the run folder)",
        *changed,
        f"precision: {config.precision} compute, exact fp32 masters ({masters}), fp32 gradient sums and moments",
    ]


def machine_line(machine: Machine) -> str:
    """The machine in one line."""
    hbm = (
        f"{gib(machine.hbm_free_bytes)} of {gib(machine.hbm_total_bytes)} HBM free, " if machine.hbm_total_bytes else ""
    )
    return (
        f"machine: {machine.device_name}, {hbm}{gib(machine.ram_available_bytes)} of {gib(machine.ram_total_bytes)} "
        f"RAM available, {machine.num_cores} cores ({machine.isa})"
    )


def plan_lines(spec: ModelSpec, plan: Plan, table: MemoryTable) -> list[str]:
    """The model, the choices, the memory table and the verdict."""
    resident = sum(block.state == "hbm" for block in plan.blocks)
    kept, attention = (sum(block.activations == way for block in plan.blocks) for way in ("keep", "keep_attention"))
    streaming, ties = len(plan.blocks) - resident, "tied" if spec.tied else "untied"
    model = f"{spec.architecture}, {spec.num_parameters:,} parameters, {len(plan.blocks)} blocks, {ties} embeddings"
    blocks = f"{streaming} blocks stream through {plan.weight_slots} slots, {resident} stay in HBM"
    if plan.clip_mode == "two-pass":
        blocks += ", two passes (gradients have no home)"
    passing = sum(segment.streams_state for segment in plan.segments)
    if passing:
        blocks += f", {passing} segments are updated on the GPU and go home to RAM"
    on_disk = sum(segment.state_on_disk or segment.weights_on_disk for segment in plan.segments)
    if on_disk:
        blocks += f", {on_disk} segments live on disk"
    keeping = f"{kept} keep their activations, {attention} their attention"
    return [
        f"model: {model}",
        f"plan: {blocks}; {keeping}; rounds of {plan.round_micro_batches} micro-batches",
        *table.lines(),
        f"verdict: {table.overall}",
    ]


def predicted_line(price: Price, num_steps: int) -> str:
    """What the plan promises for the steps to come, and whose rates it goes by."""
    step_s = price.prediction.step_s
    return (
        f"predicted: {step_s:.3f} s/step, {price.tokens_per_s:,.0f} tok/s, {num_steps:,} steps in "
        f"{clock(num_steps * step_s)}; compiling, evaluations and saves come on top (rates: {price.rates_source})"
    )


def measured_line(price: Price, step_s: float) -> str:
    """What became of the promise; `step_s`: of the median step."""
    ratio = step_s / price.prediction.step_s
    return f"measured: {step_s:.3f} s/step (median), {ratio:.2f} times the predicted {price.prediction.step_s:.3f} s"


def plan_json(spec: ModelSpec, plan: Plan, table: MemoryTable, machine: Machine) -> dict[str, object]:
    """The same as one JSON object; plan.json of the run folder."""
    return {
        "verdict": table.overall,
        "num_parameters": table.num_parameters,
        "architecture": spec.architecture,
        "memory": [row._asdict() for row in table.rows],
        "totals": {tier: table.total_bytes(tier) for tier in TIERS},
        "budgets": dict(table.budgets),
        "peak_phase": table.peak,
        "plan": asdict(plan),
        "machine": asdict(machine),
    }


def advice_lines(config: RunConfig, machine: Machine) -> list[str]:
    """What is allowed, and hardly meant: keys that do nothing, and a machine that computes padding."""
    return [*_unheard(config), *_idle_budgets(config, machine), *_padding(config)]


def _unheard(config: RunConfig) -> list[str]:
    """Keys of an evaluation that there is none of. What would end or choose by one is refused."""
    if config.eval_steps is None or config.eval_dataset is not None:
        return []
    return [f"advice: eval_steps is {config.eval_steps}, but nothing is evaluated; set eval_dataset"]


def _idle_budgets(config: RunConfig, machine: Machine) -> list[str]:
    """Budgets beyond what is free, which a plan never goes by."""
    asked, free = dict(config.memory), free_bytes(machine)
    return [
        f"advice: memory.{tier} is {gib(asked[tier])}, but only {gib(free[tier])} are free: the budget changes nothing"
        for tier in TIERS
        if asked[tier] is not None and asked[tier] > free[tier]
    ]


def _padding(config: RunConfig) -> list[str]:
    """Micro-batches that no step fills, or of which whole rows leave more than a 32nd empty."""
    row_tokens, micro_tokens = config.max_length, config.micro_batch_tokens or 0
    step_tokens, (num_rows, empty_tokens) = config.train_batch_size * row_tokens, divmod(micro_tokens, row_tokens)
    if micro_tokens > step_tokens:
        text = (
            f"advice: a step has {step_tokens:,} tokens, micro_batch_tokens is {micro_tokens:,}: the rest of each "
            "micro-batch is padding, computed like text; leave micro_batch_tokens out, or raise train_batch_size"
        )
    elif config.packing and empty_tokens > micro_tokens // 32:
        text = (
            f"advice: {num_rows} × {row_tokens:,} tokens (max_length) fit in {micro_tokens:,}; the other "
            f"{empty_tokens:,} of each micro-batch are empty: set micro_batch_tokens to {num_rows * row_tokens}"
        )
    else:
        return []
    return [text]


def show_preview(path: str, report: Report, rows: Sequence[PreviewRow]) -> None:
    """Format, rows, trained share and histogram; trained text is green and between ⟦ ⟧, so that pipes show it too."""
    console = Console(highlight=False, soft_wrap=True)  # a line that is broken here is broken in the data
    console.print(f"dataset {path}", markup=False)
    console.print(
        f"format {report.format}: {report.rows_in} rows read, {report.rows_out} used, {report.num_tokens:,} tokens, "
        f"{report.trained_share:.1%} trained, {report.num_truncated} cut, longest {report.longest_tokens} tokens"
    )
    for row in rows:
        console.print(f"\n{row.file}:{row.line}  {row.num_tokens} tokens, {row.num_trained} trained", markup=False)
        text = Text()
        for piece, trained in row.pieces:
            shown = visible(piece)
            text.append(f"⟦{shown}⟧" if trained else shown, style="green" if trained else "dim")
        console.print(text)
    console.print("\nlengths (tokens, at most: samples)")
    most = max(report.length_histogram.values(), default=1)
    for bound, count in sorted(report.length_histogram.items()):
        console.print(f"  {bound:>8}  {count:>8}  {'█' * max(1, round(40 * count / most))}")
    for reason, count in report.reasons.items():
        console.print(f"left out: {count} rows: {reason}", markup=False)
    for bad in report.bad_rows[:5]:
        console.print(f"  {bad.file}:{bad.line}: {bad.reason}", markup=False)
    for warning in report.warnings:
        console.print(f"warning: {warning}", markup=False)

"""Account: the memory table of a plan, row by row, and the budgets it is held against. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config import RunConfig
from megatrain.hardware import Machine
from megatrain.hardware.rates import Rates
from megatrain.models.spec import ModelSpec
from megatrain.planner import sizes
from megatrain.planner.landing import landing_bytes
from megatrain.planner.prediction import Workload
from megatrain.planner.sizes import Shapes, layouts_of, shapes_of
from megatrain.planner.table import TIERS, MemoryRow, MemoryTable
from megatrain.schedule.plan import Plan, Tier


@dataclass(frozen=True)
class Question:
    """What a plan is chosen for. `machine_tier`: where slots are, hbm on a GPU, ram on a CPU."""

    shapes: Shapes
    config: RunConfig
    machine: Machine
    work: Workload

    @property
    def num_micro_batches(self) -> int:
        return self.work.num_micro_batches

    @property
    def machine_tier(self) -> Tier:
        return "hbm" if self.machine.device == "cuda" else "ram"


def question_of(spec: ModelSpec, config: RunConfig, machine: Machine, rates: Rates) -> Question:
    """The question that a resolved config asks of a machine."""
    shapes = shapes_of(spec, layouts_of(spec, config), config, machine.device)
    rows_per_micro_batch = shapes.micro_batch_tokens // config.max_length
    num_micro_batches = -(-config.train_batch_size // rows_per_micro_batch)
    work = Workload(shapes, rates, num_micro_batches, config.max_length, machine.device == "cpu")
    return Question(shapes, config, machine, work)


def memory_table(question: Question, plan: Plan) -> MemoryTable:
    """Every row of the table, for this plan."""
    shapes, device_tier = question.shapes, question.machine_tier
    weight_pool, grad_pool = sizes.pool_bytes(shapes, plan)
    kept = plan.round_micro_batches * sum(
        shapes.saved_bytes[block.name] for block in plan.blocks if block.activations == "keep"
    )
    working = {
        "backward of a block": sizes.block_working_bytes(shapes),
        "head and loss": sizes.head_working_bytes(shapes),
        "backward of the embedding": sizes.embedding_working_bytes(shapes),
    }
    peak = max(working, key=lambda phase: working[phase])
    own = {s.name: sizes.segment_hbm_bytes(shapes, s) for s in plan.segments}
    rows = [
        *home_rows(shapes, plan),
        MemoryRow(
            "slots and homes of EMBED and HEAD", device_tier, own[plan.segments[0].name] + own[plan.segments[-1].name]
        ),
        MemoryRow("homes of resident blocks", device_tier, sum(own[block.name] for block in plan.blocks)),
        MemoryRow("shared weight slots", device_tier, weight_pool),
        MemoryRow("shared gradient slots", device_tier, grad_pool),
        MemoryRow("second gradient of the tied embedding", device_tier, sizes.tied_gradient_bytes(shapes, plan)),
        MemoryRow("boundary activations of a round", device_tier, sizes.boundary_bytes(shapes, plan)),
        MemoryRow("kept activations of a round", device_tier, kept),
        MemoryRow("kept attention of a round", device_tier, sizes.kept_attention_bytes(shapes, plan)),
        MemoryRow("block inputs waiting in RAM", "ram", sizes.waiting_bytes(shapes, plan)),
        MemoryRow(f"working memory ({peak})", device_tier, working[peak]),
        MemoryRow("program and libraries", "ram", sizes.PROGRAM_RAM_BYTES[question.machine.device]),
    ]
    if question.machine.device == "cuda":
        rows.append(MemoryRow("CUDA libraries", "hbm", sizes.CONTEXT_HBM_BYTES))
    copies = kept_checkpoints(question)
    if copies:
        rows.append(MemoryRow("checkpoint writer", "ram", sizes.SAVE_BUFFER_BYTES))
        rows.append(MemoryRow(f"checkpoints ({copies})", "disk", copies * sizes.checkpoint_bytes(shapes)))
    rows = [row for row in rows if row.num_bytes]
    return MemoryTable(tuple(rows), budgets_of(question), peak, shapes.num_parameters)


def kept_checkpoints(question: Question) -> int:
    """Checkpoints on disk at one time: a new one is whole before an old one goes, and the best one is kept besides."""
    config = question.config
    if config.save_strategy == "no":
        return 0
    return config.save_total_limit + 1 + (config.eval_dataset is not None)


def home_rows(shapes: Shapes, plan: Plan) -> list[MemoryRow]:
    """What the store holds in RAM and on disk."""
    away = [s for s in plan.segments if s.state != "hbm"]
    weights = {True: 0, False: 0}  # on disk -> bytes
    states = {True: 0, False: 0}
    for segment in away:
        weights[segment.weights_on_disk] += sizes.weights_bytes(shapes, segment.name)
        states[segment.state_on_disk] += sizes.state_bytes(shapes, segment.name)
    slots = landing_bytes(plan, shapes.layouts, shapes.compute_bytes) if plan.disk_slots else {}
    drained = [sizes.gradient_bytes(shapes, s.name) for s in plan.segments if not s.updates_on_device]
    if plan.clip_mode == "two-pass":  # no home: slots in RAM on the way to the updates
        drained = [plan.grad_landing_slots * max(drained, default=0)]
    return [
        MemoryRow("weights", "ram", weights[False]),
        MemoryRow("optimizer state", "ram", states[False]),
        MemoryRow("gradients", "ram", sum(drained)),
        MemoryRow("landing slots of the disk", "ram", plan.disk_slots * sum(slots.values())),
        MemoryRow("weights on disk", "disk", weights[True]),
        MemoryRow("optimizer state on disk", "disk", states[True]),
    ]


def free_bytes(machine: Machine) -> dict[Tier, int]:
    """What the machine has free in each tier."""
    return {"hbm": machine.hbm_free_bytes, "ram": machine.ram_available_bytes, "disk": machine.disk_free_bytes}


def budgets_of(question: Question) -> dict[Tier, int]:
    """What each tier may hold: what the user allows, but never more than the machine has free."""
    memory, has = question.config.memory, free_bytes(question.machine)
    asked: dict[Tier, int | None] = {"hbm": memory.hbm, "ram": memory.ram, "disk": memory.disk}
    budgets: dict[Tier, int] = {}
    for tier in TIERS:
        wish = asked[tier]
        budgets[tier] = has[tier] if wish is None else min(has[tier], wish)
    return budgets

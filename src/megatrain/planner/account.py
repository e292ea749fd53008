"""Account: the memory table of a plan, row by row, and the budgets it is held against. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatrain.config import RunConfig
from megatrain.hardware import Machine
from megatrain.hardware.rates import Rates
from megatrain.models.spec import ModelSpec
from megatrain.planner import sizes
from megatrain.planner.ledger import Entries, Ledger
from megatrain.planner.prediction import Workload
from megatrain.planner.sizes import Shapes, layouts_of, shapes_of
from megatrain.planner.table import MemoryRow, MemoryTable
from megatrain.schedule.plan import Plan, Tier

FREE: Mapping[Tier, str] = {"hbm": "hbm_free_bytes", "ram": "ram_available_bytes", "disk": "disk_free_bytes"}


@dataclass(frozen=True)
class Question:
    """What a plan is chosen for. `machine_tier`: where slots are, hbm on a GPU, ram on a CPU. `to_the_brim`: tiers of
    which nothing needs to be to spare."""

    shapes: Shapes
    config: RunConfig
    machine: Machine
    work: Workload
    to_the_brim: tuple[Tier, ...] = ()

    @property
    def num_micro_batches(self) -> int:
        return self.work.num_micro_batches

    @cached_property
    def entries(self) -> Entries:
        """The bytes of every segment that a plan of it is made of."""
        return Entries(self.shapes)

    @cached_property
    def budgets(self) -> dict[Tier, int]:
        """What each tier may hold: what the user allows, but never more than the machine has free."""
        memory, has = self.config.memory, free_bytes(self.machine)
        asked: dict[Tier, int | None] = {"hbm": memory.hbm, "ram": memory.ram, "disk": memory.disk}
        return {tier: has[tier] if wish is None else min(has[tier], wish) for tier, wish in asked.items()}

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
    ledger = Ledger(question.entries, plan)
    weight_pool, grad_pool = ledger.pool_bytes()
    working, ends = ledger.working_bytes(), ledger.ends_bytes()
    peak = max(working, key=working.__getitem__)
    rows = [
        *home_rows(ledger),
        MemoryRow("slots and homes of EMBED and HEAD", device_tier, ends),
        MemoryRow("homes of resident blocks", device_tier, ledger.total_bytes("own") - ends),
        MemoryRow("shared weight slots", device_tier, weight_pool),
        MemoryRow("shared gradient slots", device_tier, grad_pool),
        MemoryRow("shared state slots", device_tier, ledger.passing_bytes()),
        MemoryRow("second gradient of the tied embedding", device_tier, ledger.tied_gradient_bytes()),
        MemoryRow("boundary activations of a round", device_tier, ledger.boundary_bytes()),
        MemoryRow("kept activations of a round", device_tier, ledger.kept_bytes()),
        MemoryRow("kept attention of a round", device_tier, ledger.kept_attention_bytes()),
        MemoryRow("block inputs waiting in RAM", "ram", ledger.waiting_bytes()),
        MemoryRow(f"working memory ({peak})", device_tier, working[peak]),
        MemoryRow("program and libraries", "ram", sizes.program_ram_bytes(shapes, question.machine.device)),
        *(MemoryRow(name, "hbm", num_bytes) for name, num_bytes in framework_bytes(question, plan).items()),
    ]
    copies = kept_checkpoints(question)
    if copies:
        rows.append(MemoryRow("checkpoint writer", "ram", sizes.SAVE_BUFFER_BYTES))
        rows.append(MemoryRow(f"checkpoints ({copies})", "disk", copies * shapes.checkpoint_bytes))
    rows = [row for row in rows if row.num_bytes]
    return MemoryTable(tuple(rows), question.budgets, peak, shapes.num_parameters)


def framework_bytes(question: Question, plan: Plan) -> dict[str, int]:
    """What a GPU's memory holds beside a plan's own tensors, and their working memory."""
    if question.machine.device == "cpu":
        return {}
    return {
        "rotary tables of a round": plan.round_micro_batches * question.shapes.call_bytes,
        "unused pieces of the working memory": sizes.unused_pool_bytes(question.shapes),
        "CUDA libraries": sizes.CONTEXT_HBM_BYTES,
    }


def kept_checkpoints(question: Question) -> int:
    """Checkpoints on disk at one time: a new one is whole before an old one goes, and the best one is kept besides."""
    config = question.config
    if config.save_strategy == "no":
        return 0
    return config.save_total_limit + 1 + (config.eval_dataset is not None)


def home_rows(ledger: Ledger) -> list[MemoryRow]:
    """What the store holds in RAM and on disk."""
    return [
        MemoryRow("weights", "ram", ledger.total_bytes("ram_weights")),
        MemoryRow("optimizer state", "ram", ledger.total_bytes("ram_state")),
        MemoryRow("gradients", "ram", ledger.gradient_homes_bytes()),
        MemoryRow("landing slots of the disk", "ram", ledger.landing_bytes()),
        MemoryRow("weights on disk", "disk", ledger.total_bytes("disk_weights")),
        MemoryRow("optimizer state on disk", "disk", ledger.total_bytes("disk_state")),
    ]


def free_bytes(machine: Machine) -> dict[Tier, int]:
    """What the machine has free in each tier."""
    return {tier: getattr(machine, name) for tier, name in FREE.items()}

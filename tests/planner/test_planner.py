"""The memory table: exact rows are what the store and the engine allocate; a misfit is refused with numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from megatrain.config import RunConfig, resolved
from megatrain.config_values import Memory, parse_size
from megatrain.errors import PlanError
from megatrain.hardware import Machine
from megatrain.hardware.described import likely_rates
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.planner import (
    MemoryTable,
    Question,
    memory_table,
    misfit,
    question_of,
    refuse_endless,
    refuse_misfit,
    search,
    sizes,
)
from megatrain.schedule.plan import Plan, validate
from megatrain.store import SegmentStore

GIB, TIB = 1 << 30, 1 << 40
CPU = Machine("cpu", "a processor", 0, 0, 64 * GIB, 60 * GIB, TIB, 2, "x86_64 avx2")
GPU = replace(CPU, device="cuda", hbm_total_bytes=80 * GIB, hbm_free_bytes=79 * GIB, ram_available_bytes=500 * GIB)
SLOT_ROWS = (
    "slots and homes of EMBED and HEAD",
    "homes of resident blocks",
    "shared weight slots",
    "shared gradient slots",
    "second gradient of the tied embedding",
    "boundary activations of a round",
)


def spec_of(
    num_layers: int = 4,
    hidden_size: int = 256,
    tied: bool = True,
    freeze: tuple[str, ...] = (),
    vocab_size: int = 1000,
) -> ModelSpec:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        max_position_embeddings=65536,
    )
    return model_spec(config, freeze=freeze)


def config_of(device: str, **keys: object) -> RunConfig:
    base = {"model": "m", "dataset": "d", "max_length": 512, "train_batch_size": 8, **keys}
    return resolved(RunConfig(**base), "cuda" if device == "cuda" else "cpu", 2)


def row_bytes(table: MemoryTable, *names: str) -> int:
    return sum(row.num_bytes for row in table.rows if row.component in names)


def asked_of(spec: ModelSpec, config: RunConfig, machine: Machine) -> tuple[Question, Plan]:
    """A question, and what the planner chooses."""
    question = question_of(spec, config, machine, likely_rates(machine))
    refuse_endless(question)
    return question, search(question)


def plan_run(spec: ModelSpec, config: RunConfig, machine: Machine) -> tuple[Plan, MemoryTable]:
    """What the planner chooses, and its memory table."""
    question, plan = asked_of(spec, config, machine)
    return plan, memory_table(question, plan)


def slots_of(spec: ModelSpec, plan: Plan, config: RunConfig, compute_bytes: int) -> int:
    """What the engine asks its device arena for."""
    assert config.micro_batch_tokens is not None
    layouts = {segment.name: layout_of(segment) for segment in spec.segments}
    return sum(sizes.slot_bytes(spec, plan, layouts, compute_bytes, config.micro_batch_tokens).values())


@pytest.mark.parametrize("freeze", [(), ("embed_tokens",), (r"layers\.0\.",)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("tied", [True, False])
def test_exact_rows_are_what_store_and_engine_allocate(tied: bool, precision: str, freeze: tuple[str, ...]) -> None:
    spec = spec_of(2, 64, tied, freeze)
    config = config_of("cpu", precision=precision, micro_batch_tokens=1024)
    plan, table = plan_run(spec, config, CPU)
    validate(plan)
    store = SegmentStore([layout_of(s) for s in spec.segments], config.precision, plan, torch.device("cpu"))
    kinds = store.num_bytes()["ram"]
    assert row_bytes(table, "weights") == kinds["w"]
    assert row_bytes(table, "optimizer state") == kinds["m"] + kinds["v"] + kinds.get("lo", 0)
    assert row_bytes(table, "gradients") == kinds["grad"]
    assert row_bytes(table, *SLOT_ROWS) == slots_of(spec, plan, config, 2 if precision == "bf16" else 4)
    assert {row.tier for row in table.rows} == {"ram", "disk"}
    store.close()


def test_a_model_that_fits_stays_in_hbm() -> None:
    spec, config = spec_of(4, 2048, tied=False, vocab_size=50_000), config_of("cuda", train_batch_size=1)
    plan, table = plan_run(spec, config, GPU)
    validate(plan)
    assert all(segment.state == "hbm" for segment in plan.segments)
    assert all(block.activations == "keep" for block in plan.blocks)
    assert row_bytes(table, "weights", "optimizer state", "gradients") == 0
    homes = sum(layout_of(s).num_elements for s in spec.segments) * 12
    assert row_bytes(table, *SLOT_ROWS) == slots_of(spec, plan, config, 2) + homes
    assert table.overall == "FITS"


def test_a_model_that_does_not_fit_streams_and_uses_what_is_spare() -> None:
    spec, config = spec_of(48, 4096), config_of("cuda", train_batch_size=64)
    plan, table = plan_run(spec, config, GPU)
    validate(plan)
    states = [segment.state for segment in plan.segments]
    assert states[0] == "hbm"
    assert 0 < states[1:-1].count("hbm") < 48
    assert states[:-1] == sorted(states[:-1]), "the front segments are the resident ones"
    assert table.verdict("hbm") == "FITS"
    assert row_bytes(table, "gradients") == 4 * sum(
        layout_of(s).num_trainable for s, p in zip(spec.segments, plan.segments, strict=True) if p.state == "ram"
    )


def test_what_is_needed_first_is_resident_first() -> None:
    """From the front, HEAD second or last: its update has the whole forward pass to hide behind. (In two passes they
    are spread.)"""
    spec = spec_of(8, 4096, tied=False, vocab_size=100_000)
    config = config_of("cuda", activations="recompute", clip_mode="deferred")
    plan, _ = plan_run(spec, config, replace(GPU, hbm_free_bytes=32 * GIB))
    states = [segment.state for segment in plan.segments]
    assert 3 <= states.count("hbm") <= 8
    assert states[:-1] == sorted(states[:-1]), "hbm first, then ram"


def test_more_rounds_when_activations_do_not_fit() -> None:
    spec = spec_of(48, 4096)
    small = replace(GPU, hbm_free_bytes=24 * GIB)
    sizes = [
        plan_run(spec, config_of("cuda", train_batch_size=batch), small)[0].round_micro_batches
        for batch in (32, 128, 2048)
    ]
    assert sizes[:2] == [1, 4]
    assert sizes[2] < 64
    one = plan_run(spec, config_of("cuda", train_batch_size=512, round_micro_batches=1), small)[0]
    assert one.round_micro_batches == 1


def test_the_user_decides_placement() -> None:
    spec = spec_of()
    plan, _ = plan_run(spec, config_of("cuda", activations="recompute", weight_slots=3), GPU)
    assert all(block.activations == "recompute" for block in plan.blocks)
    assert plan.weight_slots == 3
    budget = Memory(hbm="2GiB")
    plan, table = plan_run(spec_of(48, 2048), config_of("cuda", memory=budget, micro_batch_tokens=512), GPU)
    assert table.budgets["hbm"] == 2 * GIB
    assert table.total_bytes("hbm") <= 2 * GIB
    assert any(segment.state == "ram" for segment in plan.segments)


def test_a_full_disk_is_no_budget_to_raise() -> None:
    spec = spec_of(2, 512)
    config = config_of("cuda")
    _, table = plan_run(spec, config, GPU)
    need = table.total_bytes("disk")
    full = replace(GPU, disk_free_bytes=need - GIB // 4)
    message = str(misfit(*asked_of(spec, config, full)))
    assert "free 256.00 MiB more, or choose an output_dir on another disk; these changes would fit: " in message
    assert "memory.disk" not in message
    assert "save_strategy: no (nothing to resume from)" in message
    asked = config.model_copy(update={"memory": Memory(disk="128MiB")})
    told = str(misfit(*asked_of(spec, asked, GPU)))
    assert "the smallest budget that would do is memory.disk: " in told


def test_refusal_names_the_smallest_budget_and_the_nearest_change() -> None:
    spec = spec_of(48, 4096)
    small = replace(GPU, hbm_free_bytes=5 * GIB)
    config = config_of("cuda", train_batch_size=64)
    _, table = plan_run(spec, config, small)
    assert table.overall == "NO"
    with pytest.raises(PlanError) as error:
        refuse_misfit(*asked_of(spec, config, small))
    assert "of hbm, the budget is 5.00 GiB (all that is free); free " in str(error.value)
    asked = config.model_copy(update={"memory": Memory(hbm="5GiB")})
    message = str(misfit(*asked_of(spec, asked, GPU)))
    assert "the budget is 5.00 GiB; " in message
    enough = int(message.split("memory.hbm: ")[1].split("MiB")[0])
    assert plan_run(spec, config, replace(GPU, hbm_free_bytes=enough << 20))[1].verdict("hbm") != "NO"
    assert plan_run(spec, config, replace(GPU, hbm_free_bytes=(enough - 1) << 20))[1].verdict("hbm") == "NO"
    tokens = int(message.split("micro_batch_tokens: ")[1].split(",")[0].split(" ")[0])
    fitting = config.model_copy(update={"micro_batch_tokens": tokens, "loss_chunk_tokens": min(2048, tokens)})
    assert plan_run(spec, fitting, small)[1].overall != "NO"
    larger = config.model_copy(update={"micro_batch_tokens": 2 * tokens, "loss_chunk_tokens": min(2048, 2 * tokens)})
    assert plan_run(spec, larger, small)[1].overall == "NO", "the nearest change, no further one"


def test_rounds_that_two_passes_cannot_have_are_refused_and_never_proposed() -> None:
    spec, rounds = spec_of(24, 2048), {"round_micro_batches": 2, "train_batch_size": 4, "micro_batch_tokens": 512}
    with pytest.raises(PlanError, match=r"takes the 4 micro-batches of a step in one round, but round_\w+ is 2"):
        plan_run(spec, config_of("cuda", clip_mode="two-pass", **rounds), GPU)
    assert plan_run(spec, config_of("cuda", clip_mode="auto", **rounds), GPU)[0].clip_mode == "deferred"
    full = replace(GPU, hbm_free_bytes=GIB, ram_available_bytes=4 * GIB, disk_free_bytes=GIB)
    asked = config_of("cuda", clip_mode="deferred", **rounds)
    message = str(misfit(*asked_of(spec, asked, full)))
    assert "the run needs" in message
    assert "clip_mode" not in message


def test_all_that_is_free_is_no_budget_to_raise() -> None:
    """What is named instead is true: each remedy, tried, fits."""
    spec = spec_of(24, 2048)

    def told(machine: Machine, **memory: str) -> str:
        asked = config_of(machine.device, save_strategy="no", memory=Memory(**memory))
        return str(misfit(*asked_of(spec, asked, machine)))

    hbm = replace(GPU, hbm_free_bytes=GIB)
    message = told(hbm)
    assert "the budget is 1.00 GiB (all that is free); free " in message
    assert " more: nvidia-smi shows what else uses the GPU" in message
    assert "memory.hbm" not in message
    assert "; take a GPU that has 1.9" in told(replace(hbm, hbm_total_bytes=GIB))
    assert "(all that is free); free " in told(hbm, hbm="60GiB"), "a budget larger than what is there is no budget"
    ram = replace(CPU, ram_available_bytes=8 * GIB, disk_free_bytes=2 * GIB)
    message = told(ram)
    assert "more: end other programs, or raise the memory limit of the container; these changes would fit: " in message
    assert "memory.ram" not in message
    enough_gib = float(message.split("an output_dir on a disk with ")[1].split(" GiB free")[0])
    for disk_gib, fits in ((enough_gib + 0.01, True), (enough_gib - 0.01, False)):
        assert (told(replace(ram, disk_free_bytes=int(disk_gib * GIB))) == "None") is fits
    assert "; take a machine that has " in told(replace(ram, ram_total_bytes=8 * GIB))
    message = told(replace(ram, disk_free_bytes=TIB), disk="2GiB")
    assert "an output_dir" not in message, "the disk has room: the run's own budget keeps it out"
    enough = message.split("memory.disk: ")[1]
    assert told(replace(ram, disk_free_bytes=TIB), disk=enough) == "None"


@pytest.mark.parametrize("save", ["no", "steps"])  # of the disk, checkpoints alone take more than there is
def test_another_machine_on_a_cpu_is_the_smallest_that_would_do(save: str) -> None:
    """Not what the plan needs that was chosen for want of any that fits: it made little of RAM that is not enough."""
    spec, config = spec_of(24, 2048), config_of("cpu", save_strategy=save)
    small = replace(CPU, ram_available_bytes=8 * GIB, ram_total_bytes=8 * GIB, disk_free_bytes=GIB)

    table = plan_run(spec, config, small)[1]
    told = str(misfit(*asked_of(spec, config, small)))
    least_gib = float(told.split("; take a machine that has ")[1].split(" GiB free")[0])
    assert least_gib <= table.total_bytes("ram") / GIB + 0.01
    kept_bytes = sum(row.num_bytes for row in table.rows if row.component.startswith("checkpoints"))
    disk_bytes = max(GIB, kept_bytes)
    for ram_gib, fits in ((least_gib + 0.01, True), (least_gib - 0.01, False)):
        there = replace(small, ram_available_bytes=int(ram_gib * GIB), disk_free_bytes=disk_bytes)
        assert (plan_run(spec, config, there)[1].overall != "NO") is fits


@pytest.mark.parametrize(
    ("tier", "device", "asked", "disk_gib"),
    [("hbm", "cuda", "2GiB", 1), ("ram", "cpu", "8GiB", 1), ("ram", "cpu", "1GiB", 100), ("ram", "cuda", "1GiB", 100)],
)
def test_the_smallest_budget_that_would_do_does(tier: str, device: str, asked: str, disk_gib: int) -> None:
    """Where RAM or the disk are short as well, the plan that is chosen asks less, or more, than would do; and where a
    disk has room for all, less of RAM will do than leaves something to spare."""
    spec, machine = spec_of(24, 2048), replace(CPU, disk_free_bytes=disk_gib * GIB)
    if device == "cuda":
        machine = replace(GPU, ram_available_bytes=4 * GIB, disk_free_bytes=disk_gib * GIB)

    def told_with(budget: str) -> str | None:
        config = config_of(device, save_strategy="no", memory=Memory(**{tier: budget}))
        return misfit(*asked_of(spec, config, machine))

    told = str(told_with(asked))
    enough = told.split(f"the smallest budget that would do is memory.{tier}: ")[1].split(";")[0]
    assert told_with(enough) is None
    assert told_with(f"{int(parse_size(enough)) - sizes.MIB}B") is not None
    asked_with = config_of(device, save_strategy="no", memory=Memory(**{tier: enough}))
    assert plan_run(spec, asked_with, machine)[1].verdict(tier) == "TIGHT", "what leaves something to spare is more"


def test_where_two_tiers_are_short_what_both_must_be_is_named() -> None:
    """No budget of one is called enough. (It was what the chosen plan needs, and more the next time.)"""
    machine = replace(GPU, ram_available_bytes=int(1.1 * GIB), disk_free_bytes=GIB, hbm_free_bytes=8 * GIB)
    spec = spec_of(1, 256)
    told = str(misfit(*asked_of(spec, config_of("cuda", memory=Memory(hbm="392MiB")), machine)))
    assert "smallest budget" not in told
    words = told.split("more of hbm alone would not do: it takes ")[1].split(", whose budget is 1.10 GiB")[0]
    hbm, ram = words.removesuffix(" of ram").split(" of hbm and ")
    enough = replace(machine, ram_available_bytes=int(parse_size(ram)))
    assert misfit(*asked_of(spec, config_of("cuda", memory=Memory(hbm=hbm)), enough)) is None
    for less_hbm, less_ram in ((sizes.MIB, 0), (0, sizes.MIB)):
        short = replace(machine, ram_available_bytes=int(parse_size(ram)) - less_ram)
        config = config_of("cuda", memory=Memory(hbm=f"{int(parse_size(hbm)) - less_hbm}B"))
        assert misfit(*asked_of(spec, config, short)) is not None


def test_a_larger_disk_is_named_with_the_budget_that_keeps_the_run_from_it() -> None:
    machine = replace(CPU, ram_available_bytes=8 * GIB, disk_free_bytes=GIB)
    spec, asked = spec_of(24, 2048), config_of("cpu", save_strategy="no", memory=Memory(disk="512MiB"))
    told = str(misfit(*asked_of(spec, asked, machine)))
    room, budget = told.split("an output_dir on a disk with ")[1].split(" free and memory.disk: ")
    there = replace(machine, disk_free_bytes=int((float(room.split()[0]) + 0.01) * GIB))
    asked = config_of("cpu", save_strategy="no", memory=Memory(disk=budget.split(",")[0].split(";")[0]))
    assert misfit(*asked_of(spec, asked, there)) is None


@pytest.mark.parametrize(
    ("tier", "machine"), [("ram", replace(CPU, ram_available_bytes=GIB)), ("disk", replace(CPU, disk_free_bytes=GIB))]
)
def test_every_tier_is_refused_before_a_byte_moves(tier: str, machine: Machine) -> None:
    spec, config = spec_of(8, 1024), config_of("cpu")
    with pytest.raises(PlanError, match=f"of {tier}, the budget is 1.00 GiB"):
        refuse_misfit(*asked_of(spec, config, machine))
    refuse_misfit(*asked_of(spec, config, CPU))


def test_what_wears_the_drive_too_much_is_refused_as_what_does_not_fit_is() -> None:
    """By one function, for `plan` and `train`; how many steps are to come may not be known."""
    spec, config = spec_of(2, 512), config_of("cuda", memory=Memory(disk_max_written="1GB"))
    question, plan = asked_of(spec, config, GPU)
    refuse_misfit(question, plan)
    refuse_misfit(question, plan, range(5000))
    with pytest.raises(PlanError, match=r"^the run would write .*disk_max_written is 1 GB; raise it"):
        refuse_misfit(question, plan, range(50_000))
    refuse_misfit(question, plan, range(45_000, 50_000))
    small = replace(question, machine=replace(GPU, disk_free_bytes=GIB // 4))
    assert str(misfit(small, plan, range(5000))).startswith("the run needs "), "what does not fit comes first"


def test_where_a_plan_file_does_not_fit_the_advice_is_about_it() -> None:
    """Smaller micro-batches, or a disk, would fit a plan of the planner's; what the file says they leave as it is."""
    spec, config = spec_of(24, 2048), config_of("cuda", train_batch_size=64, save_strategy="no")
    roomy, ram = asked_of(spec, config, GPU)[1], replace(GPU, ram_available_bytes=64 * GIB)

    def told(machine: Machine, plan: Plan = roomy, **memory: str) -> str:
        question, _ = asked_of(spec, config.model_copy(update={"memory": Memory(**memory)}), machine)
        return str(misfit(question, plan, plan_file=Path("mine.json")))

    assert told(GPU) == "None"
    message = told(ram, hbm="20GiB")
    assert message.startswith("by --plan mine.json the run needs ")
    assert message.endswith("; or leave --plan out: the planner's own plan fits")
    assert "would fit" not in message
    enough = message.split("the smallest budget that would do is memory.hbm: ")[1].split(";")[0]
    assert told(ram, hbm=enough) == "None"
    message = told(replace(ram, hbm_total_bytes=8 * GIB, hbm_free_bytes=8 * GIB))
    assert "; let less of it live there; or leave --plan out: the planner's own plan fits" in message
    nothing = replace(ram, hbm_free_bytes=GIB)
    own = str(misfit(*asked_of(spec, config, nothing)))
    assert told(nothing).endswith(f"; or leave --plan out: {own}"), "no plan fits: then what would"


def test_the_planner_starts_without_torch() -> None:
    code = "import sys, json, megatrain.planner, megatrain.config; print(json.dumps('torch' in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown) is False


def test_a_model_that_is_only_read_is_planned_too() -> None:
    trained = spec_of(4, 1024)
    segments = tuple(
        replace(segment, tensors=tuple(replace(tensor, trainable=False) for tensor in segment.tensors))
        for segment in trained.segments
    )
    frozen = replace(trained, segments=segments)
    plan, table = plan_run(frozen, config_of("cuda"), GPU)
    assert not any(segment.trainable for segment in plan.segments)
    assert all(segment.weights == "own" for segment in plan.segments), "weights that fit stay in HBM"
    assert table.overall == "FITS"


def test_a_refusal_names_the_average_where_that_is_what_does_not_fit() -> None:
    spec, kept = spec_of(8, 1024), config_of("cpu", ema_decay=0.9)
    without = kept.model_copy(update={"ema_decay": None})
    tables = [plan_run(spec, config, CPU)[1] for config in (kept, without)]
    for row, copies in (("optimizer state", 1), ("checkpoints (3)", 3)):
        more = row_bytes(tables[0], row) - row_bytes(tables[1], row)
        assert 0 <= more - 4 * copies * spec.num_parameters < sizes.MIB, row
    disk = sum(table.total_bytes("disk") for table in tables) // 2  # room for the checkpoints of one of the two
    small = replace(CPU, disk_free_bytes=disk)
    table = plan_run(spec, kept, small)[1]
    assert table.overall == "NO"
    assert "these changes would fit: ema_decay: null" in str(misfit(*asked_of(spec, kept, small)))

"""What the planner counts for a placement is what engine and store take: every tier, to the byte or the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain.engine.places import Places
from megatrain.models.layout import layout_of
from megatrain.models.spec_of import model_spec
from megatrain.planner import account, sizes
from megatrain.planner.ledger import Entries, Ledger
from megatrain.store import SegmentStore, WaitingInputs
from tests.engine.streamed import Placement, make_plan
from tests.engine.test_identity import ALL, PLACEMENTS, _fitting
from tests.families import tiny_config

CPU = torch.device("cpu")
TOKENS, PAGE_BYTES = 40, 4096
MORE = {
    "two passes, all on disk, inputs offloaded": Placement(
        two_pass=True, state_on_disk=ALL, weights_on_disk=ALL, offload=True, act_slots=3
    ),
    "two passes, nothing on the host": Placement(two_pass=True, resident=ALL),
}
EVERY = PLACEMENTS | MORE
FROZEN = {"smollm2": (r"layers\.0\.",), "gemma3": (), "llama": ("embed_tokens",)}


@pytest.mark.parametrize(
    ("family", "precision", "extra_state"),
    [("gemma3", "bf16", ()), ("smollm2", "fp32", ("ema",)), ("llama", "bf16", ("ema",))],
    ids=["gemma3", "smollm2", "llama"],
)
@pytest.mark.parametrize("placement", EVERY)
def test_the_plan_counts_what_is_taken(
    placement: str, extra_state: tuple[str, ...], family: str, precision: str, tmp_path: Path
) -> None:
    spec = model_spec(tiny_config(family), freeze=FROZEN[family])
    plan = make_plan(spec, _fitting(family, EVERY[placement]))
    layouts = {segment.name: layout_of(segment, extra_state) for segment in spec.segments}
    compute_bytes = 2 if precision == "bf16" else 4
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    shapes = sizes.Shapes(spec, layouts, compute_bytes, TOKENS, 8, compiled=False)
    store = SegmentStore(list(layouts.values()), precision, plan, CPU, tmp_path)
    places = Places(spec, plan, store, CPU, dtype, TOKENS)
    waiting = WaitingInputs(plan.waiting_in_ram, plan.round_micro_batches, TOKENS * spec.hidden_size, dtype, CPU)
    taken = {tier: sum(kinds.values()) for tier, kinds in store.num_bytes().items()}
    slots_bytes = sum(sizes.slot_bytes(spec, plan, layouts, compute_bytes, TOKENS).values())

    ledger = Ledger(Entries(shapes), plan)
    counted_device_bytes = (
        ledger.total_bytes("own")
        + sum(ledger.pool_bytes())
        + ledger.passing_bytes()
        + ledger.tied_gradient_bytes()
        + ledger.boundary_bytes()
        + ledger.kept_attention_bytes()
    )
    assert counted_device_bytes == slots_bytes + taken.get("hbm", 0)
    assert slots_bytes <= places.arena.num_bytes <= slots_bytes + 256 * len(places.arena._pieces)
    for tier in ("ram", "disk"):
        counted = sum(row.num_bytes for row in account.home_rows(Ledger(Entries(shapes), plan)) if row.tier == tier)
        assert counted == taken.get(tier, 0), tier
    reserved = sum(arena.num_bytes for arena in store._arenas) + (store.disk.landing_bytes if store.disk else 0)
    in_ram = [kind for segment in layouts for kind in store.kinds(segment)]
    assert taken.get("ram", 0) <= reserved <= taken.get("ram", 0) + PAGE_BYTES * (len(in_ram) + 2)
    waits = plan.round_micro_batches * len(plan.waiting_in_ram)
    waiting_bytes = 0 if waiting._arena is None else waiting._arena.num_bytes
    assert ledger.waiting_bytes() <= waiting_bytes <= ledger.waiting_bytes() + PAGE_BYTES * waits
    waiting.close()
    store.close()


def test_the_placements_hold_every_way() -> None:
    plans = [make_plan(model_spec(tiny_config("gemma3")), _fitting("gemma3", p)) for p in EVERY.values()]
    assert any(plan.waiting_in_ram for plan in plans)
    assert any(plan.clip_mode == "two-pass" and plan.disk_slots and plan.waiting_in_ram for plan in plans)
    assert any(segment.streams_state for plan in plans for segment in plan.segments)
    assert any(replace(plan, disk_slots=0) != plan for plan in plans)

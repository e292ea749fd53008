"""The device arena holds what the plan asks for and the planner counts; the store keeps what must be in RAM."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.places import Places
from megatrain.models.layout import layout_of
from megatrain.models.spec_of import model_spec
from megatrain.planner import account, sizes
from megatrain.planner.ledger import Entries, Ledger
from megatrain.schedule.ops import Place
from megatrain.store.store import SegmentStore
from tests.engine.streamed import Placement, make_plan
from tests.families import tiny_config

SPEC = model_spec(tiny_config("llama"))
LAYOUTS = {segment.name: layout_of(segment) for segment in SPEC.segments}
STREAMED = frozenset({"EMBED", "L000"})


@pytest.mark.parametrize(("precision", "compute_bytes"), [("bf16", 2), ("fp32", 4)])
def test_state_slots_hold_the_largest_that_passes_and_gradients_have_a_home(precision, compute_bytes):
    plan = make_plan(SPEC, Placement(streamed=STREAMED))
    table = sizes.slot_bytes(SPEC, plan, LAYOUTS, compute_bytes, 8)
    shapes = sizes.Shapes(SPEC, LAYOUTS, compute_bytes, 8, 8, compiled=False)
    for segment in plan.segments:
        own = sum(size for name, size in table.items() if segment.name in name.split("."))
        assert own == sizes.segment_hbm_bytes(shapes, segment), segment.name
    slots = [sum(size for name, size in table.items() if name.startswith(f"s.{k}.")) for k in range(3)]
    largest = max(sizes.state_bytes(shapes, name) for name in STREAMED)
    assert slots == [largest, largest, 0]
    assert Ledger(Entries(shapes), plan).passing_bytes() == sum(slots)
    store = SegmentStore(list(LAYOUTS.values()), precision, plan, torch.device("cpu"))
    assert all("grad" in store.kinds(s.name) for s in plan.segments)
    rows = {row.component: row.num_bytes for row in account.home_rows(Ledger(Entries(shapes), plan))}
    kinds = store.num_bytes()["ram"]
    assert rows["gradients"] == kinds["grad"]
    assert rows["optimizer state"] == kinds["m"] + kinds["v"] + kinds.get("lo", 0)
    store.close()


@pytest.mark.parametrize(("precision", "kinds"), [("bf16", ["lo", "m", "v"]), ("fp32", ["m", "v"])])
def test_state_at_home_and_in_its_slot_are_two_memories_of_one_form(precision, kinds):
    plan = make_plan(SPEC, Placement(streamed=STREAMED))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    store = SegmentStore(list(LAYOUTS.values()), precision, plan, torch.device("cpu"))
    places = Places(SPEC, plan, store, torch.device("cpu"), dtype, 8)
    home, slot = (places.state(place, "L000") for place in (Place("ram.state", "L000"), Place("s", 1)))
    assert list(home) == list(slot) == kinds
    places.poison(Place("s", 1))
    for kind in kinds:
        assert (home[kind].dtype, home[kind].shape) == (slot[kind].dtype, slot[kind].shape)
        assert slot[kind].view(torch.uint8).eq(0xFF).all()
        assert not home[kind].view(torch.uint8).any(), "the home is zeroed and must stay so"
    store.close()


def test_a_landing_slot_is_poisoned_once_the_copy_from_it_has_happened(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """On a GPU the last read is a copy on a stream, which the handler has only queued; the poison is the host's."""
    plan = make_plan(SPEC, Placement(weights_on_disk=STREAMED))
    store = SegmentStore(list(LAYOUTS.values()), "bf16", plan, torch.device("cpu"), tmp_path)
    places = Places(SPEC, plan, store, torch.device("cpu"), torch.bfloat16, 8)
    slot, seen = Place("land.w", 1), []

    class Stream:
        def synchronize(self) -> None:
            seen.append(bool(places.flat(slot, "L000").isnan().any()))

    monkeypatch.setattr(store, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    places.poison(slot)
    assert seen == [False]
    assert places.flat(slot, "L000").isnan().all()
    store.close()

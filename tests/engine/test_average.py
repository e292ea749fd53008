"""The running average of the masters equals the reference loop's, bit for bit, at any placement."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatrain.engine.chaos import Chaos
from megatrain.models.layout import layout_of
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from megatrain.planner import account, sizes
from megatrain.planner.ledger import Entries, Ledger
from megatrain.store import SegmentStore
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, make_plan, same_bytes
from tests.families import tiny_batch, tiny_config, tiny_masters

TOKENS, DECAY = 40, 0.9
HYPERS = [AdamW(1e-2 / (k + 1), 0.9, 0.95, 1e-8, 0.1) for k in range(3)]
STEPS = [[tiny_batch(cut, seed=3 * step + i) for i, cut in enumerate([(17, 23), (40,), (9, 31)])] for step in range(3)]
ALL = frozenset({"EMBED", "L000", "L001", "HEAD"})
PLACEMENTS = {
    "ram": Placement(),
    "ram, rounds": Placement(round_micro_batches=1, weight_slots=3),
    "two passes": Placement(two_pass=True),
    "two passes, some in hbm": Placement(two_pass=True, resident=frozenset({"EMBED", "L001"})),
    "hbm": Placement(resident=ALL),
    "streamed": Placement(streamed=ALL, round_micro_batches=2),
    "streamed, some in hbm": Placement(streamed=frozenset({"L000", "HEAD"}), resident=frozenset({"EMBED"})),
    "disk": Placement(state_on_disk=ALL, weights_on_disk=ALL, disk_slots=1),
    "state on disk here and there": Placement(state_on_disk=frozenset({"L000", "HEAD"}), disk_slots=3),
}


def wanted(family: str, precision: str, **options) -> reference.Result:
    config = tiny_config(family)
    return reference.train(
        config, tiny_masters(model_spec(config)), STEPS, HYPERS, precision=precision, max_grad_norm=1.0,
        chunk_tokens=CHUNK_TOKENS, attn_implementation="megatrain", **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> dict[str, reference.Result]:
    return {precision: wanted("smollm2", precision, ema_decay=DECAY) for precision in ("fp32", "bf16")}


def run_of(family: str, precision: str, placement: Placement = PLACEMENTS["ram"], **options) -> Streamed:
    config = tiny_config(family)
    masters = tiny_masters(model_spec(config))
    return Streamed(config, masters, TOKENS, precision=precision, placement=placement, ema_decay=DECAY, **options)


def differing(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> list[str]:
    assert found.keys() == want.keys()
    return [name for name, value in found.items() if value.tobytes() != want[name].tobytes()]


CHAOS = Chaos(5, max_delay_s=0.001)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("precision", "chaos"), [("fp32", None), ("bf16", None), ("bf16", CHAOS)], ids=["calm-fp32", "calm-bf16", "chaos"]
)
def test_averages_are_the_references_and_weights_are_as_without(placement, precision, chaos, plain) -> None:
    run = run_of("smollm2", precision, PLACEMENTS[placement], chaos=chaos)
    try:
        run.train(STEPS, HYPERS)
        assert differing(run.averages(), plain[precision].averages) == []
        assert same_bytes(run.state(), plain[precision].state) == []
    finally:
        run.close()


def test_averages_lie_between_the_first_and_the_last_masters(plain) -> None:
    """The reference's own: neither masters nor where they started, and the state is that of a run without them."""
    want, first = plain["fp32"], tiny_masters(model_spec(tiny_config("smollm2")))
    for name, average in want.averages.items():
        assert np.any(average != want.state[name][0]), name
        assert np.any(average != first[name]), name
    without = wanted("smollm2", "fp32")
    assert without.averages == {}
    assert same_bytes(without.state, want.state) == []


def test_frozen_tensors_have_none() -> None:
    run = run_of("llama", "bf16", freeze=["embed_tokens", r"layers\.0\..*proj"])
    try:
        run.train(STEPS, HYPERS)
        want = wanted("llama", "bf16", ema_decay=DECAY, freeze=["embed_tokens", r"layers\.0\..*proj"])
        assert "model.embed_tokens.weight" not in want.averages
        assert differing(run.averages(), want.averages) == []
    finally:
        run.close()


@pytest.mark.parametrize("placement", ["ram", "streamed", "disk", "two passes"])
def test_a_skipped_step_changes_no_average(placement) -> None:
    run = run_of("smollm2", "fp32", PLACEMENTS[placement])
    try:
        run.train(STEPS[:1], HYPERS[:1])
        before = run.averages()
        skipped = run.engine.train_step(STEPS[1], 1e-320, HYPERS[1], 2)  # its inverse is Inf, and so are gradients
        assert not skipped.applied
        assert differing(run.averages(), before) == []
        run.train(STEPS[2:], HYPERS[2:])
        assert len(differing(run.averages(), before)) == len(before), "an applied step changes each of them"
    finally:
        run.close()


@pytest.mark.parametrize(("precision", "bytes_each"), [("bf16", 14), ("fp32", 12)])
def test_four_bytes_a_parameter_where_the_state_is(precision, bytes_each) -> None:
    spec = model_spec(tiny_config("llama"))
    plan = make_plan(spec, Placement(resident=frozenset({"L000"})))
    layouts = [layout_of(segment, ("ema",)) for segment in spec.segments]
    store = SegmentStore(layouts, precision, plan, torch.device("cpu"))
    for layout in layouts:
        sizes = [store.flat(layout.segment, kind).nbytes for kind in store.state_kinds]
        assert sum(sizes) == bytes_each * layout.num_trainable
        assert store.flat(layout.segment, "ema").dtype == torch.float32
    assert store.num_bytes()["hbm"]["ema"] == 4 * store.layouts["L000"].num_trainable
    store.close()


@pytest.mark.parametrize(("precision", "compute_bytes"), [("bf16", 2), ("fp32", 4)])
def test_the_planner_counts_what_store_and_engine_make(tmp_path, precision, compute_bytes) -> None:
    spec = model_spec(tiny_config("llama"))
    plan = make_plan(spec, Placement(streamed=frozenset({"L000"}), state_on_disk=frozenset({"L001"})))
    layouts = {segment.name: layout_of(segment, ("ema",)) for segment in spec.segments}
    shapes = sizes.Shapes(spec, layouts, compute_bytes, 8, 8, compiled=False)
    slots = sizes.slot_bytes(spec, plan, layouts, compute_bytes, 8)
    assert slots["s.1.ema"] == 4 * layouts["L000"].num_trainable
    assert sum(size for name, size in slots.items() if name.startswith("s.1.")) == sizes.state_bytes(shapes, "L000")
    store = SegmentStore(list(layouts.values()), precision, plan, torch.device("cpu"), tmp_path)
    held = store.num_bytes()
    rows = {row.component: row.num_bytes for row in account.home_rows(Ledger(Entries(shapes), plan))}
    assert rows["optimizer state"] == sum(held["ram"][kind] for kind in store.state_kinds)
    assert rows["optimizer state on disk"] == sum(held["disk"][kind] for kind in store.state_kinds)
    assert rows["landing slots of the disk"] == held["ram"]["landing"]
    store.close()

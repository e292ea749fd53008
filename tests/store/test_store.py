"""SegmentStore: which buffers exist, where, how large; exact masters through (w, lo)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.memory import Pinned
from megatrain.memory import pinned as pinned_module
from megatrain.models.layout import Layout, layout_of
from megatrain.models.spec import SegmentSpec, TensorSpec
from megatrain.optim import spec
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.store import SegmentStore, join_master, split_master
from megatrain.store import store as store_module

CPU = torch.device("cpu")


def _tensor(name: str, shape: tuple[int, ...], *, trainable: bool = True, decay: bool = True) -> TensorSpec:
    return TensorSpec(f"model.{name}", name, shape, trainable, decay)


SEGMENTS = (
    SegmentSpec("EMBED", "embed", (_tensor("embed", (10, 8), trainable=False),)),
    SegmentSpec(
        "L000",
        "block",
        (_tensor("norm", (8,), decay=False), _tensor("q", (16, 8)), _tensor("frozen", (3, 50), trainable=False)),
    ),
    SegmentSpec("HEAD", "head", (_tensor("head", (10, 8)), _tensor("final", (8,), decay=False))),
)


def make_store(precision: store_module.Precision, block: str = "ram", head: str = "ram") -> SegmentStore:
    plans = (
        SegmentPlan("EMBED", "embed", trainable=False, weights="own", grads="own"),
        SegmentPlan("L000", "block", trainable=True, state=block),  # type: ignore[arg-type]
        SegmentPlan("HEAD", "head", trainable=True, weights="own", grads="own", state=head),  # type: ignore[arg-type]
    )
    plan = Plan(plans, tied=False, weight_slots=2, grad_slots=2, round_micro_batches=1)
    return SegmentStore([layout_of(segment) for segment in SEGMENTS], precision, plan, CPU)


# ---- the master rule


def edge_patterns() -> Tensor:
    """Every upper half with the lower halves where rounding and carries happen."""
    upper = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], dtype=torch.int64)[None, :]
    return (upper | lower).flatten().to(torch.int32).view(torch.float32)


def random_patterns() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("patterns", [edge_patterns(), random_patterns()], ids=["edge", "random"])
def test_split_and_join_are_exact_and_round_by_the_rule(patterns: Tensor):
    """The bits of the specification, of NaNs too: what loads and saves masters agrees with what updates them."""
    hi, lo = split_master(patterns)
    rule_hi, rule_lo = spec.split(patterns.numpy())
    assert np.array_equal(hi.view(torch.int16).numpy().view(np.uint16), rule_hi)
    assert np.array_equal(lo.numpy(), rule_lo)
    back = join_master(hi, lo).view(torch.int32).numpy()
    assert np.array_equal(back, spec.join(rule_hi, rule_lo).view(np.int32))
    exact = ~patterns.isnan().numpy()
    assert np.array_equal(back[exact], patterns.view(torch.int32).numpy()[exact])


def test_rounding_differs_from_the_frameworks_cast_on_exact_ties_only():
    patterns = random_patterns()
    patterns = patterns[~patterns.isnan()]
    hi, _ = split_master(patterns)
    differs = hi.view(torch.int16) != patterns.to(torch.bfloat16).view(torch.int16)
    assert bool(((patterns.view(torch.int32)[differs] & 0xFFFF) == 0x8000).all())
    tie = torch.tensor([0x3F80_8000], dtype=torch.int32).view(torch.float32)
    assert split_master(tie)[0].view(torch.int16).item() == 0x3F81  # away from zero; the cast gives 0x3F80


# ---- buffers


@pytest.mark.parametrize(("precision", "w_dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_kinds_sizes_and_dtypes(precision: store_module.Precision, w_dtype: torch.dtype):
    store = make_store(precision, head="hbm")
    state = ("lo", "m", "v") if precision == "bf16" else ("m", "v")
    assert store.kinds("EMBED") == ("w",)
    assert store.kinds("L000") == ("w", *state, "grad")
    assert store.kinds("HEAD") == ("w", *state)
    layout = store.layouts["L000"]
    assert layout.num_elements > layout.num_trainable > 0
    assert store.flat("L000", "w").shape == (layout.num_elements,)
    assert store.flat("L000", "w").dtype == w_dtype
    for kind in (*state, "grad"):
        flat = store.flat("L000", kind)
        assert flat.shape == (layout.num_trainable,)
        assert flat.dtype == (torch.int16 if kind == "lo" else torch.float32)
        assert flat.data_ptr() % 4096 == 0
        assert not flat.any()
    with pytest.raises(KeyError):
        store.flat("EMBED", "m")


def test_buffers_do_not_overlap():
    store = make_store("bf16", head="hbm")
    for number, (segment, kind) in enumerate((s, k) for s in store.layouts for k in store.kinds(s)):
        assert not store.flat(segment, kind).any()
        store.flat(segment, kind).fill_(number + 1)


@pytest.mark.parametrize("empty", range(3))
def test_any_segment_may_be_without_tensors(empty: int):
    """A tied HEAD behind a final norm without weights is one (OLMo)."""
    segments = [s if i != empty else SegmentSpec(s.name, s.kind, ()) for i, s in enumerate(SEGMENTS)]
    own = {"weights": "own", "grads": "own"}
    plans = [
        SegmentPlan(s.name, s.kind, any(t.trainable for t in s.tensors), **({} if s.kind == "block" else own))  # type: ignore[arg-type]
        for s in segments
    ]
    plan = Plan(tuple(plans), tied=False, weight_slots=2, grad_slots=2, round_micro_batches=1)
    store = SegmentStore([layout_of(segment) for segment in segments], "bf16", plan, CPU)
    name = segments[empty].name
    assert store.kinds(name) == ("w",)
    assert store.flat(name, "w").shape == (0,)
    assert store.views(store.flat(name, "w"), name) == {}
    store.close()


def test_num_bytes_by_tier_and_kind():
    layout = layout_of(SEGMENTS[1])
    sizes = make_store("bf16", head="hbm").num_bytes()
    embed, head = layout_of(SEGMENTS[0]), layout_of(SEGMENTS[2])
    assert sizes == {
        "ram": {
            "w": 2 * (embed.num_elements + layout.num_elements),
            "lo": 2 * layout.num_trainable,
            "m": 4 * layout.num_trainable,
            "v": 4 * layout.num_trainable,
            "grad": 4 * layout.num_trainable,
        },
        "hbm": {
            "w": 2 * head.num_elements,
            "lo": 2 * head.num_trainable,
            "m": 4 * head.num_trainable,
            "v": 4 * head.num_trainable,
        },
    }


def test_views_are_shaped_shared_and_filtered():
    store = make_store("bf16")
    flat = store.flat("L000", "w")
    views = store.views(flat, "L000")
    assert {name: tuple(view.shape) for name, view in views.items()} == {"q": (16, 8), "norm": (8,), "frozen": (3, 50)}
    views["q"][15, 7] = 3.0
    assert flat[store.layouts["L000"]["model.q"].stop - 1].item() == 3.0
    assert all(view.data_ptr() % 256 == 0 for view in views.values())
    grads = store.views(store.flat("L000", "grad"), "L000", trainable_only=True)
    assert set(grads) == {"q", "norm"}


# ---- masters


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("block", ["ram", "hbm"])
def test_master_round_trip_whole_and_in_pieces(precision: store_module.Precision, block: str):
    store = make_store(precision, block=block)
    entry = store.layouts["L000"]["model.q"]
    values = torch.randn(128, generator=torch.Generator().manual_seed(1))
    store.set_master("L000", entry, values[:50])
    store.set_master("L000", entry, values[50:], start=50)
    assert torch.equal(store.master("L000", entry), values)
    assert torch.equal(store.master("L000", entry, 3, 77), values[3:77])
    norm = store.layouts["L000"]["model.norm"]
    assert not store.master("L000", norm).any()
    copy = store.master("L000", entry)
    copy.zero_()
    assert torch.equal(store.master("L000", entry), values)


def test_frozen_tensor_keeps_its_rounded_weights_alone():
    store = make_store("bf16")
    entry = store.layouts["EMBED"]["model.embed"]
    values = torch.randn(80, generator=torch.Generator().manual_seed(2))
    store.set_master("EMBED", entry, values)
    assert torch.equal(store.master("EMBED", entry), split_master(values)[0].float())


def test_master_outside_its_tensor_is_refused():
    store = make_store("fp32")
    entry = store.layouts["L000"]["model.q"]
    with pytest.raises(ValueError, match=r"model\.q: elements \[100, 129\) of 128"):
        store.set_master("L000", entry, torch.zeros(29), start=100)
    with pytest.raises(ValueError, match=r"elements \[-1, 4\)"):
        store.master("L000", entry, -1, 4)


# ---- what cannot be


def test_disk_homes_without_a_folder_and_foreign_layouts_are_refused():
    with pytest.raises(ValueError, match="HEAD lives on disk: give the store a disk_folder"):
        make_store("bf16", head="disk")
    layouts: list[Layout] = [layout_of(SEGMENTS[0])]
    plan = Plan((SegmentPlan("L000", "block", trainable=True),), False, 2, 2, 1)
    with pytest.raises(ValueError, match=r"\['EMBED'\].*\['L000'\]"):
        SegmentStore(layouts, "bf16", plan, CPU)


@pytest.mark.parametrize(
    ("update", "travels"), [("home", [("w", "grad")]), ("device", [("w", "grad"), ("lo", "m", "v")])]
)
def test_only_what_travels_is_pinned_and_close_unpins(
    monkeypatch: pytest.MonkeyPatch, update: str, travels: list[tuple[str, ...]]
):
    pinned_sizes: list[list[int]] = []
    unpinned: list[Pinned] = []

    def fake_register(buffers: Sequence[torch.Tensor]) -> Pinned:
        pinned_sizes.append([buffer.nbytes for buffer in buffers])
        return Pinned(sum(pinned_sizes[-1]), (), "refused after 0 bytes")

    monkeypatch.setattr(pinned_module, "register", fake_register)
    monkeypatch.setattr(store_module, "unregister", unpinned.append)
    segment = SegmentPlan("L000", "block", trainable=True, weights="own", grads="own", update=update)  # type: ignore[arg-type]
    plan = Plan((segment,), False, 2, 2, 1)
    layout = layout_of(SEGMENTS[1])
    with pytest.warns(UserWarning, match="refused after 0 bytes; copies will be slower"):
        store = SegmentStore([layout], "bf16", plan, torch.device("cuda"))
    assert pinned_sizes == [[store.flat("L000", kind).nbytes for kind in kinds] for kinds in travels]
    for _ in range(2):
        store.close()
        assert len(unpinned) == len(travels)
    with pytest.raises(KeyError):
        store.flat("L000", "w")

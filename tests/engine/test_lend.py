"""Lender: what is lent is what the store holds, in any order of homes, pass after pass."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.lend import Lender
from megatrain.models.layout import layout_of
from megatrain.models.spec import SegmentSpec, TensorSpec
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.store import SegmentStore

CPU = torch.device("cpu")


def filled(num_blocks: int, resident: frozenset[int] = frozenset()) -> tuple[SegmentStore, Plan]:
    """A store of blocks of different sizes, every element with a value of its own."""
    names = ["EMBED", *(f"L{i:03d}" for i in range(num_blocks)), "HEAD"]
    segments, plans = [], []
    for number, name in enumerate(names):
        kind = {"EMBED": "embed", "HEAD": "head"}.get(name, "block")
        tensors = (
            TensorSpec(f"{name}.a", "a", (3, 5 + number), False, True),
            TensorSpec(f"{name}.b", "b", (7,), False, False),
        )
        segments.append(SegmentSpec(name, kind, tensors))
        home = "hbm" if number - 1 in resident else "ram"
        own = "own" if kind != "block" or home == "hbm" else "pool"
        plans.append(SegmentPlan(name, kind, trainable=False, weights=own, grads=own, state=home))
    plan = Plan(tuple(plans), tied=False, weight_slots=2, grad_slots=1, round_micro_batches=1)
    store = SegmentStore([layout_of(segment) for segment in segments], "fp32", plan, CPU)
    for number, name in enumerate(names):
        flat = store.flat(name, "w")
        flat.copy_(torch.arange(flat.numel()) + 1000.0 * number)
    return store, plan


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5])
@pytest.mark.parametrize("resident", [frozenset(), frozenset({0}), frozenset({1, 3})])
def test_every_pass_lends_every_block_whole(num_blocks: int, resident: frozenset[int]) -> None:
    store, plan = filled(num_blocks, resident)
    lender = Lender(store, plan, CPU, through_slots=True)
    for _ in range(3):
        for index in range(num_blocks):
            lent = lender.block(index)
            own = store.views(store.flat(f"L{index:03d}", "w"), f"L{index:03d}")
            assert lent.keys() == own.keys()
            for name, view in lent.items():
                assert torch.equal(view, own[name])
                in_place = view.data_ptr() == own[name].data_ptr()
                assert in_place is (index in resident)
    travelling = [i for i in range(num_blocks) if i not in resident]
    size = sum(store.flat(f"L{i:03d}", "w").nbytes for i in travelling)
    assert lender.streamed_bytes == (size if len(travelling) > 2 else 0)


def test_the_next_block_is_there_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store, plan = filled(4)
    lender = Lender(store, plan, CPU, through_slots=True)
    fetched: list[str] = []
    fetch = Lender._fetch

    def spy(self: Lender, name: str, slot: int) -> None:
        fetched.append(name)
        fetch(self, name, slot)

    monkeypatch.setattr(Lender, "_fetch", spy)
    lender.block(0)
    assert fetched == ["L000", "L001"]
    for index in (1, 2, 3):
        lender.block(index)
    assert fetched == ["L000", "L001", "L002", "L003", "L000"], "each once, the next pass's first included"
    assert torch.equal(lender.block(0)["a"], store.views(store.flat("L000", "w"), "L000")["a"])


def test_blocks_that_fit_the_slots_are_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    fetch = Lender._fetch

    def spy(self: Lender, name: str, slot: int) -> None:
        fetched.append(name)
        fetch(self, name, slot)

    monkeypatch.setattr(Lender, "_fetch", spy)
    for num_blocks in (1, 2):
        fetched.clear()
        lender = Lender(*filled(num_blocks), CPU, through_slots=True)
        for index in [*range(num_blocks)] * 3:
            lender.block(index)
        assert fetched == ["L000", "L001"][:num_blocks]


def test_without_slots_nothing_is_copied() -> None:
    store, plan = filled(3)
    lender = Lender(store, plan, CPU, through_slots=False)
    assert lender.block(1)["a"].data_ptr() == store.views(store.flat("L001", "w"), "L001")["a"].data_ptr()
    assert lender.streamed_bytes == 0
    assert lender.link_Bps() is None
    assert lender.outer().keys() == {"EMBED.a", "EMBED.b", "HEAD.a", "HEAD.b"}

"""Averages begin at the masters and take their place, piece by piece, wherever both live."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.checkpoint import average
from megatrain.models.layout import layout_of
from megatrain.models.spec_of import model_spec
from megatrain.store import SegmentStore
from tests.engine.streamed import Placement, make_plan
from tests.families import tiny_config

SPEC = model_spec(tiny_config("llama"), freeze=["embed_tokens", r"layers\.0\.mlp"])
ALL = frozenset(segment.name for segment in SPEC.segments)
HOMES = {
    "ram": Placement(),
    "hbm": Placement(resident=ALL),
    "disk": Placement(state_on_disk=ALL, weights_on_disk=ALL, disk_slots=1),
}


def random_store(precision: str, placement: Placement, folder: Path) -> SegmentStore:
    """Masters, m, v and averages drawn at random; the average is not what `set_master` began."""
    layouts = [layout_of(segment, ("ema",)) for segment in SPEC.segments]
    store = SegmentStore(layouts, precision, make_plan(SPEC, placement), torch.device("cpu"), folder)
    drawn = torch.Generator().manual_seed(3)
    for layout in layouts:
        with store.visit(layout.segment, write=True):
            for entry in layout.entries:
                values = torch.randn(entry.tensor.num_elements, generator=drawn)
                store.set_master(layout.segment, entry, values)
                for kind in ("m", "v", "ema") if entry.tensor.trainable else ():
                    where = store.flat(layout.segment, kind)[entry.offset : entry.stop]
                    where.copy_(torch.randn(entry.tensor.num_elements, generator=drawn))
    return store


def contents(store: SegmentStore) -> dict[str, dict[str, torch.Tensor]]:
    """Kind -> tensor's name -> its values; "w": the masters."""
    found: dict[str, dict[str, torch.Tensor]] = {"w": {}, "m": {}, "v": {}, "ema": {}}
    for segment, layout in store.layouts.items():
        with store.visit(segment):
            for entry in layout.entries:
                found["w"][entry.tensor.name] = store.master(segment, entry)
                for kind in ("m", "v", "ema") if entry.tensor.trainable else ():
                    found[kind][entry.tensor.name] = store.flat(segment, kind)[entry.offset : entry.stop].clone()
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("home", HOMES)
def test_begin_and_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, home: str) -> None:
    monkeypatch.setattr(average, "CHUNK_ELEMENTS", 1000)
    store = random_store(precision, HOMES[home], tmp_path)
    before = contents(store)
    assert not same({**before["w"], **before["ema"]}, before["w"])
    average.take_averages(store)
    taken = contents(store)
    assert same(taken["w"], {**before["w"], **before["ema"]}), "frozen tensors keep their weights"
    assert same(taken["ema"], before["ema"])
    store.close()
    store = random_store(precision, HOMES[home], tmp_path)
    average.start_averages(store)
    begun = contents(store)
    assert same(begun["w"], before["w"])
    assert same(begun["ema"], {name: before["w"][name] for name in before["ema"]})
    for kind in "mv":
        assert same(begun[kind], before[kind])
        assert same(taken[kind], before[kind])
    store.close()

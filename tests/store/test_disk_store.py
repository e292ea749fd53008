"""Homes on disk: the same bytes as homes in RAM, through landing slots; load, save, resume and export as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from megatrain.checkpoint import (
    CheckpointWriter,
    load_checkpoint,
    load_weights,
    restore,
    save_checkpoint,
    write_hf_folder,
)
from megatrain.checkpoint.dcp import dcp_state
from megatrain.errors import CheckpointError, DiskError
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec
from megatrain.optim import AdamW
from megatrain.planner.account import home_rows
from megatrain.planner.landing import extents_of, landing_bytes, loaded_bytes
from megatrain.planner.ledger import Entries, Ledger
from megatrain.planner.sizes import Shapes
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.store import SegmentStore
from megatrain.store.store import Precision
from tests.checkpoint.checkpoint_cases import fill_random, make_store, tiny_config, tiny_spec

CPU = torch.device("cpu")
SPEC = tiny_spec(freeze_embed=True)
NAMES = [segment.name for segment in SPEC.segments]
ALL = dict.fromkeys(NAMES, ("disk", "disk"))
SOME = {"L000": ("disk", "ram"), "L001": ("ram", "disk"), "EMBED": ("ram", "disk")}


def plan_of(spec: ModelSpec, homes: Mapping[str, tuple[str, str]], slots: int = 2) -> Plan:
    """`homes`: segment -> (home of the state, home of the weights); the others in RAM."""
    plans = []
    for segment in spec.segments:
        trainable = any(tensor.trainable for tensor in segment.tensors)
        plan = SegmentPlan(segment.name, segment.kind, trainable, weights="own", grads="own")
        state, weights = homes.get(segment.name, ("ram", "ram"))
        plans.append(replace(plan, state=state if trainable else "ram", weights_home=weights))  # type: ignore[arg-type]
    return Plan(tuple(plans), spec.tied, 2, 2, 1, disk_slots=slots)


def disk_store(
    folder: Path, precision: Precision, homes: Mapping[str, tuple[str, str]] = ALL, slots: int = 2
) -> SegmentStore:
    return SegmentStore([layout_of(s) for s in SPEC.segments], precision, plan_of(SPEC, homes, slots), CPU, folder)


def extents(plan: Plan, store: SegmentStore, size: int) -> list[tuple[str, int]]:
    """(kind, bytes in whole pages) of everything that lives on disk."""
    return [extent for segment in plan.segments for extent in extents_of(segment, store.layouts[segment.name], size)]


def contents(store: SegmentStore) -> dict[tuple[str, str], torch.Tensor]:
    """Every buffer that has a meaning between steps, copied."""
    found = {}
    for segment in store.layouts:
        with store.visit(segment):
            for kind in store.kinds(segment):
                if kind != "grad":
                    found[segment, kind] = store.flat(segment, kind).clone()
    return found


def differing(one: Mapping[tuple[str, str], torch.Tensor], other: Mapping[tuple[str, str], torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [".".join(key) for key in one if not torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8))]


def copy_into(store: SegmentStore, source: SegmentStore) -> None:
    for segment in store.layouts:
        with store.visit(segment, write=True):
            for kind in store.kinds(segment):
                if kind != "grad":
                    store.flat(segment, kind).copy_(source.flat(segment, kind))


@pytest.fixture(params=["bf16", "fp32"])
def precision(request: pytest.FixtureRequest) -> Precision:
    return request.param


def random_store(precision: Precision) -> SegmentStore:
    store = make_store(SPEC, precision)
    fill_random(store, 7)
    return store


# ---- buffers


@pytest.mark.parametrize("homes", [ALL, SOME], ids=["all", "some"])
@pytest.mark.parametrize("slots", [1, 3])
def test_what_a_visit_writes_the_next_one_finds(
    tmp_path: Path, precision: Precision, homes: dict[str, tuple[str, str]], slots: int
):
    source, store = random_store(precision), disk_store(tmp_path, precision, homes, slots)
    assert not any(buffer.any() for buffer in contents(store).values()), "zero at first, like homes in RAM"
    copy_into(store, source)
    assert differing(contents(store), contents(source)) == []
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_only_planned_kinds_are_on_disk_and_bytes_are_where_the_plan_says(tmp_path: Path, precision: Precision):
    store = disk_store(tmp_path, precision, SOME, slots=3)
    state = ("lo", "m", "v") if precision == "bf16" else ("m", "v")
    assert {name: store.on_disk(name) for name in NAMES} == {
        "EMBED": ("w",), "L000": state, "L001": ("w",), "HEAD": ()
    }  # fmt: skip
    size = 2 if precision == "bf16" else 4
    plan = plan_of(SPEC, SOME, slots=3)
    table = extents(plan, store, size)
    found = store.num_bytes()
    pages = sum(num_bytes for _, num_bytes in table)
    assert pages - 4096 * len(table) < sum(found["disk"].values()) <= pages
    assert found["ram"]["landing"] == 3 * sum(landing_bytes(plan, store.layouts, size).values())
    shapes = Shapes(SPEC, store.layouts, size, 8, 8, compiled=False)
    rows = {row.component: row.num_bytes for row in home_rows(Ledger(Entries(shapes), plan))}
    assert rows["landing slots of the disk"] == found["ram"]["landing"], "what the planner counts"
    store.close()


def test_a_home_on_disk_is_out_of_reach_unless_visited(tmp_path: Path):
    store = disk_store(tmp_path, "bf16")
    with pytest.raises(KeyError, match=r"L000\.m is not in memory"):
        store.flat("L000", "m")
    with store.visit("L000", "m"):
        store.flat("L000", "m").fill_(1)
        with pytest.raises(KeyError, match=r"L000\.v is not in memory"):
            store.flat("L000", "v")
    with pytest.raises(KeyError, match=r"L000\.m is not in memory"):
        store.flat("L000", "m")
    store.close()


def test_a_visit_reads_what_is_on_disk_unless_it_is_at_hand(tmp_path: Path):
    store = disk_store(tmp_path, "bf16")
    assert store.disk is not None
    with store.visit("L000", write=True):
        store.flat("L000", "m").fill_(1)
    before = store.disk.file.read_bytes
    with store.visit("L000"):
        assert store.flat("L000", "m").eq(1).all()
        store.flat("L000", "m").fill_(2)  # not written: against the contract, to see what is read again
    assert store.disk.file.read_bytes == before, "at hand"
    with store.visit("L001"):
        pass
    with store.visit("L000"):
        assert store.flat("L000", "m").eq(1).all()
    assert store.disk.file.read_bytes > before
    store.close()


def test_a_visit_that_fails_is_not_taken_for_what_is_on_disk(tmp_path: Path):
    store = disk_store(tmp_path, "bf16")
    with store.visit("L000", write=True):
        store.flat("L000", "m").fill_(1)
    with pytest.raises(RuntimeError), store.visit("L000", write=True):
        store.flat("L000", "m").fill_(2).sum().view(7)  # no 7 elements there
    with store.visit("L000"):
        assert store.flat("L000", "m").eq(1).all()
    store.close()


def test_landing_slots_do_not_overlap(tmp_path: Path):
    store = disk_store(tmp_path, "bf16", slots=3)
    assert store.disk is not None
    places = [(segment, kind, k) for segment in NAMES for kind in store.on_disk(segment) for k in range(3)]
    spans: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for segment, kind, k in places:
        flat = store.disk.landing(segment, kind, k)
        spans.setdefault((kind, k), set()).add((flat.data_ptr(), flat.data_ptr() + flat.nbytes))
    whole = sorted((min(start for start, _ in found), max(stop for _, stop in found)) for found in spans.values())
    assert len(whole) == 3 * 4
    assert all(stop <= start for (_, stop), (start, _) in pairwise(whole))
    store.close()


def test_damage_on_disk_is_told_with_segment_and_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store = disk_store(tmp_path, "bf16")
    assert store.disk is not None
    with store.visit("L000", write=True):
        store.flat("L000", "v").fill_(1)
    calls = store.disk.file._calls
    real = calls.read

    def flip(fd: int, buffer: memoryview, offset_bytes: int) -> int:
        got = real(fd, buffer, offset_bytes)
        buffer[5] ^= 1
        return got

    monkeypatch.setattr(calls, "read", flip)
    store.load("L001", {})
    with (
        pytest.raises(DiskError, match=r"L000\.v, bytes 0 to .* came back from the disk changed"),
        store.visit("L000", "v"),
    ):
        pass
    store.close()


# ---- files


@pytest.mark.parametrize("homes", [ALL, SOME], ids=["all", "some"])
def test_what_loading_writes_to_the_disk_is_known_beforehand(
    tmp_path: Path, precision: Precision, homes: dict[str, tuple[str, str]]
) -> None:
    """Each home there, once: of a new run without moments, which are zeros, of one that goes on with them."""
    source, config = random_store(precision), tiny_config()
    write_hf_folder(tmp_path / "base", source, SPEC, config, None, dtype=torch.float32)
    (tmp_path / "run").mkdir()
    writer = CheckpointWriter(tmp_path / "run", source, SPEC, config, None, keep=2, run_facts={})
    save_checkpoint(writer, 3, lambda write: [write(segment) for segment in NAMES], {"step": 3})  # type: ignore[arg-type]
    checkpoint = load_checkpoint(tmp_path / "run", "auto")
    assert checkpoint is not None
    for resumed, extra_state in ((False, ()), (True, ()), (False, ("ema",)), (True, ("ema",))):  # averages begin anew
        layouts = [layout_of(segment, extra_state) for segment in SPEC.segments]
        store = SegmentStore(layouts, precision, plan_of(SPEC, homes), torch.device("cpu"), tmp_path)
        if resumed:
            restore(store, checkpoint)
        else:
            load_weights(tmp_path / "base", store, SPEC)
        said = loaded_bytes(plan_of(SPEC, homes), store.layouts, 2 if precision == "bf16" else 4, resumed=resumed)
        assert store.disk is not None
        assert 0 < said == store.disk.file.written_bytes
        store.close()


def test_load_save_resume_and_export_are_those_of_homes_in_ram(tmp_path: Path, precision: Precision):
    config, source = tiny_config(), random_store(precision)
    base = tmp_path / "base"
    write_hf_folder(base, source, SPEC, config, None, dtype=torch.float32)
    ram, disk = make_store(SPEC, precision), disk_store(tmp_path, precision, slots=1)
    for store in (ram, disk):
        load_weights(base, store, SPEC)
    assert differing(contents(disk), contents(ram)) == []
    copy_into(disk, source)
    for name, store in (("ram", source), ("disk", disk)):
        (tmp_path / name).mkdir()
        writer = CheckpointWriter(tmp_path / name, store, SPEC, config, None, keep=2, run_facts={})
        save_checkpoint(writer, 3, lambda write: [write(segment) for segment in reversed(NAMES)], {"step": 3})  # type: ignore[arg-type]
        for dtype in (torch.bfloat16, torch.float32):
            write_hf_folder(tmp_path / f"{name}-{dtype}", store, SPEC, config, None, dtype=dtype)
    for folder in (
        "{}/checkpoints/step-3/model",
        "{}/checkpoints/step-3/state",
        "{}-torch.bfloat16",
        "{}-torch.float32",
    ):
        one, other = (
            {p.name: p.read_bytes() for p in (tmp_path / folder.format(n)).iterdir()} for n in ("ram", "disk")
        )
        assert one == other, folder
        assert one, folder
    checkpoint = load_checkpoint(tmp_path / "ram", "auto")
    assert checkpoint is not None
    again = disk_store(tmp_path, precision, SOME)
    restore(again, checkpoint)
    assert differing(contents(again), contents(source)) == []


def test_export_reads_each_home_once(tmp_path: Path):
    store = disk_store(tmp_path, "bf16", slots=1)
    assert store.disk is not None
    copy_into(store, random_store("bf16"))
    before = store.disk.file.read_bytes
    write_hf_folder(tmp_path / "out", store, SPEC, tiny_config(), None, dtype=torch.float32)
    sizes = [n for kind, n in extents(plan_of(SPEC, ALL), store, 2) if kind in ("w", "lo")]
    assert store.disk.file.read_bytes - before == sum(sizes)


def test_a_distributed_checkpoint_needs_the_state_in_memory(tmp_path: Path):
    store = disk_store(tmp_path, "bf16", SOME)
    with pytest.raises(CheckpointError, match=r"EMBED and 2 more live on disk; raise memory\.ram, or export as hf"):
        dcp_state(store, SPEC, AdamW(1e-3, 0.9, 0.99, 1e-8, 0.0), 1)

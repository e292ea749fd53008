"""A disk that fails in the middle of a step, what a step moves, and how much memory a model on disk takes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatrain.engine.lend import Lender
from megatrain.errors import DiskError
from megatrain.models.spec_of import model_spec
from tests.engine.streamed import Placement, Streamed, same_bytes
from tests.engine.test_identity import ALL, HYPERS, TOKENS, batches
from tests.families import tiny_batch, tiny_config, tiny_masters

ON_DISK = Placement(state_on_disk=ALL, weights_on_disk=ALL)


def on_disk(precision: str = "fp32", disk_slots: int = 2) -> Streamed:
    config, placement = tiny_config("llama"), replace(ON_DISK, disk_slots=disk_slots)
    return Streamed(config, tiny_masters(model_spec(config)), TOKENS, precision=precision, placement=placement)


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_disk_that_fails_in_a_step_ends_the_run_with_the_bytes_it_lost(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    run = on_disk()
    assert run.store.disk is not None
    run.train(batches()[:1], HYPERS[:1])

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(run.store.disk.file._calls, verb, fail)
    with pytest.raises(DiskError, match=r"[A-Z0-9]+\.[a-z]+, bytes 0 to .*Input/output error; the disk or the memory"):
        run.train(batches()[1:2], HYPERS[1:2])
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="resume from a checkpoint"):
        run.engine.flush()
    run.close()


def test_bytes_that_change_on_disk_between_steps_are_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_disk()
    assert run.store.disk is not None
    run.train(batches()[:1], HYPERS[:1])
    real = run.store.disk.file._calls.read

    def flip(fd: int, buffer: memoryview, offset_bytes: int) -> int:
        got = real(fd, buffer, offset_bytes)
        buffer[17] ^= 4
        return got

    monkeypatch.setattr(run.store.disk.file._calls, "read", flip)
    with pytest.raises(DiskError, match="came back from the disk changed"):
        run.train(batches()[1:2], HYPERS[1:2])
    run.close()


def test_what_a_step_moves_is_what_lives_on_disk() -> None:
    run = on_disk()
    assert run.store.disk is not None
    file, sizes = run.store.disk.file, run.store.num_bytes()["disk"]
    run.train(batches()[:1], HYPERS[:1])
    written = file.written_bytes
    run.engine.flush()
    pages = 4096 * len(run.store.layouts) * len(sizes)
    assert sum(sizes.values()) <= file.written_bytes - written <= sum(sizes.values()) + pages, "each byte once"
    other = Streamed(tiny_config("llama"), tiny_masters(model_spec(tiny_config("llama"))), TOKENS, precision="fp32")
    other.train(batches()[:1], HYPERS[:1])
    assert same_bytes(run.state(), other.state()) == []
    for each in (run, other):
        each.close()


def test_a_skipped_step_writes_nothing() -> None:
    config = tiny_config("llama")
    broken = {name: value.copy() for name, value in tiny_masters(model_spec(config)).items()}
    broken["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf
    run = Streamed(config, broken, TOKENS, precision="fp32", placement=ON_DISK)
    assert run.store.disk is not None
    before = run.state()
    (result,) = run.train(batches()[:1], HYPERS[:1])
    assert not result.applied
    written = run.store.disk.file.written_bytes
    run.engine.flush()
    assert run.store.disk.file.written_bytes == written
    assert same_bytes(run.state(), before) == []
    run.close()


@pytest.mark.parametrize("two_pass", [False, True], ids=["deferred", "two passes"])
def test_what_is_written_late_is_written_whatever_the_next_step_decides(
    monkeypatch: pytest.MonkeyPatch, two_pass: bool
) -> None:
    """The next step is skipped while updates of the step before are still on their way to the disk."""
    config = tiny_config("llama")
    masters = tiny_masters(model_spec(config))
    poison = len(masters["model.embed_tokens.weight"]) - 1
    masters["model.embed_tokens.weight"][poison] = np.inf
    steps = [[tiny_batch((24,), seed=step, vocab_size=poison)] for step in range(3)]
    steps[1][0].input_ids_T[7] = poison
    placement = Placement(state_on_disk=ALL, two_pass=two_pass, disk_slots=2)
    runs = [Streamed(config, masters, 24, precision="fp32", placement=p) for p in (placement, Placement())]
    first = runs[0].train(steps[:1], HYPERS[:1]) + runs[1].train(steps[:1], HYPERS[:1])
    handlers, spill = runs[0].engine._handlers, runs[0].store.spill
    before, until_s = handlers.cell, time.monotonic() + 60.0
    spilled = []

    def late(segment: str, slots: Mapping[str, int]) -> None:
        """The last but one waits until the step is decided."""
        spilled.append(segment)
        last_but_one = 1 if two_pass else len(runs[0].store.layouts) - 1
        while len(spilled) == last_but_one and handlers.cell is before and time.monotonic() < until_s:
            time.sleep(0.001)
        spill(segment, slots)

    with monkeypatch.context() as patched:
        patched.setattr(runs[0].store, "spill", late)
        second = runs[0].train(steps[1:2], HYPERS[1:2])
    assert len(spilled) == (2 if two_pass else len(runs[0].store.layouts))
    second += runs[1].train(steps[1:2], HYPERS[1:2])
    third = [result for run in runs for result in run.train(steps[2:], HYPERS[2:])]
    assert [[result.applied for result in results] for results in (first, second, third)] == [
        [True, True], [False, False], [True, True]
    ]  # fmt: skip
    assert same_bytes(runs[0].state(), runs[1].state()) == []
    for run in runs:
        run.close()


@pytest.mark.parametrize("through_slots", [True, False])
def test_weights_on_disk_are_lent_for_writing_text(through_slots: bool) -> None:
    config = tiny_config("llama")
    masters = tiny_masters(model_spec(config))
    here, there = Streamed(config, masters, TOKENS, precision="bf16"), on_disk("bf16", disk_slots=1)
    want = Lender(here.store, here.engine.plan, torch.device("cpu"), through_slots=False)
    lender = Lender(there.store, there.engine.plan, torch.device("cpu"), through_slots=through_slots)
    assert lender.outer().keys() == want.outer().keys()
    outer = lender.outer()
    for _ in range(2):
        for index in range(len(here.engine.plan.blocks)):
            wanted, found = want.block(index), lender.block(index)
            assert wanted.keys() == found.keys()
            assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert all(torch.equal(outer[name], value) for name, value in want.outer().items()), "no view of a landing slot"
    for each in (here, there):
        each.close()


LOADER = """
import sys, torch
from pathlib import Path
from megatrain.memory import peak_rss_bytes, reset_peak_rss
from megatrain.models.layout import layout_of
from megatrain.models.spec import SegmentSpec, TensorSpec
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.store import SegmentStore

def loaded(count):
    names = ["EMBED", *(f"L{i:03d}" for i in range(14)), "HEAD"]
    kinds = ["embed", *["block"] * 14, "head"]
    specs = [SegmentSpec(n, k, (TensorSpec(n, n, (count,), True, True),)) for n, k in zip(names, kinds)]
    placed = {"weights": "own", "grads": "own", "state": "disk", "weights_home": "disk"}
    plan = Plan(tuple(SegmentPlan(n, k, True, **placed) for n, k in zip(names, kinds)), False, 2, 2, 1, disk_slots=1)
    store = SegmentStore([layout_of(s) for s in specs], "bf16", plan, torch.device("cpu"), Path(sys.argv[1]))
    for spec in specs:
        with store.visit(spec.name, write=True):
            store.set_master(spec.name, store.layouts[spec.name][spec.name], torch.ones(count))
    return store

loaded(1 << 16).close()  # libraries and threads
reset_peak_rss()
before = peak_rss_bytes()
sizes = loaded(1 << 20).num_bytes()
print(sum(sizes["disk"].values()), sum(sizes["ram"].values()), peak_rss_bytes() - before)
"""


def test_the_peak_of_memory_at_load_is_landing_slots_and_gradients(tmp_path: Path) -> None:
    quick_to_return = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "65536"}
    words = [sys.executable, "-c", LOADER, tmp_path]
    done = subprocess.run(words, env=quick_to_return, capture_output=True, text=True, check=True)
    on_disk_bytes, in_ram_bytes, peak_bytes = map(int, done.stdout.split())
    assert on_disk_bytes == 16 * (1 << 20) * 12
    assert in_ram_bytes == 16 * (1 << 20) * 4 + (1 << 20) * 12
    one_tensor_bytes = (1 << 20) * 4
    assert in_ram_bytes <= peak_bytes < in_ram_bytes + 7 * one_tensor_bytes, "the rest: temporaries of one tensor"
    assert list(tmp_path.iterdir()) == []

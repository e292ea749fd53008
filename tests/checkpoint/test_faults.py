"""Nothing lost: whatever file operation fails, the newest valid checkpoint is at least the last acknowledged one."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.checkpoint import CheckpointWriter, Files, load_checkpoint, restore, save_checkpoint
from megatrain.errors import UserError
from megatrain.models.spec import ModelSpec, SegmentSpec, TensorSpec
from megatrain.store import SegmentStore
from tests.checkpoint.checkpoint_cases import fill_random, make_store, stores_equal, tiny_config
from tests.checkpoint.faults import FaultyFiles, Killed, PowerCutFiles, QuickFiles, ShortFiles, count_operations


def _spec() -> ModelSpec:
    """Three segments, as small as they can be: a sweep saves some hundred times."""

    def segment(name: str, *tensors: str) -> SegmentSpec:
        kind = {"EMBED": "embed", "HEAD": "head"}.get(name, "block")
        return SegmentSpec(name, kind, tuple(TensorSpec(t, t, (30, 70), True, True) for t in tensors))  # type: ignore[arg-type]

    return ModelSpec(
        "X", (segment("EMBED", "e"), segment("L000", "a", "b"), segment("HEAD", "h")), False, 1, 1, (), 0, 1
    )


SPEC = _spec()


def _store(step: int) -> SegmentStore:
    """What training gave at `step`: known bits."""
    store = make_store(SPEC, "bf16")
    fill_random(store, seed=step)
    return store


STORES = {step: _store(step) for step in (1, 2, 3, 4)}


def _save(run_dir: Path, step: int, files: Files) -> None:
    def write_parts(write_segment: Callable[[str], None]) -> None:
        for segment in SPEC.segments:
            write_segment(segment.name)

    writer = CheckpointWriter(run_dir, STORES[step], SPEC, tiny_config(), None, keep=2, run_facts={}, files=files)
    save_checkpoint(writer, step, write_parts, {"step": step})


@pytest.fixture
def two_saved() -> Iterator[Path]:
    """A run folder with steps 1 and 2, in memory where there is such a place: thousands of files come and go."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        run_dir = Path(folder) / "two_saved"
        run_dir.mkdir()
        _save(run_dir, 1, Files())  # the real ones, once
        _save(run_dir, 2, Files())
        yield run_dir


def _refusal(work: Callable[[], object]) -> str | None:
    """What the error says to the user, or None if the work was done."""
    try:
        work()
    except UserError as error:
        return str(error)
    return None


def _fresh(original: Path, number: int) -> Path:
    run_dir = original.parent / f"run{number}"
    shutil.copytree(original, run_dir)
    return run_dir


def _check(run_dir: Path, acknowledged: int, context: object) -> None:
    """The newest valid checkpoint is no older than `acknowledged` and holds its step's bits; training can go on."""
    checkpoint = load_checkpoint(run_dir, "auto")
    assert checkpoint is not None, context
    assert checkpoint.step >= acknowledged, context
    back = make_store(SPEC, "bf16")
    restore(back, checkpoint)
    assert stores_equal(back, STORES[checkpoint.step]), context
    assert checkpoint.trainer_state == {"step": checkpoint.step}, context
    _save(run_dir, 4, QuickFiles())
    after = load_checkpoint(run_dir, "auto")
    assert after is not None
    assert after.step == 4, context
    assert not [name for name in os.listdir(run_dir / "checkpoints") if ".tmp-" in name], context
    shutil.rmtree(run_dir)


def test_the_sweep_covers_every_kind_of_operation(two_saved: Path):
    files = FaultyFiles(-1, None)
    _save(two_saved, 3, files)
    assert set(files.names_done) == {
        "make_folder", "create", "reserve", "write", "fsync", "close", "open", "read", "rename", "sync_folder",
        "names", "remove_file", "remove_folder", "free_bytes",
    }  # fmt: skip
    assert files.count > 80


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EINTR], ids=["ENOSPC", "EIO", "EINTR"])
def test_an_error_at_any_operation_loses_nothing(two_saved: Path, code: int):
    total = count_operations(lambda files: _save(_fresh(two_saved, 0), 3, files))
    refused = 0
    for at in range(total):
        run_dir = _fresh(two_saved, at + 1)
        files = FaultyFiles(at, OSError(code, os.strerror(code)))
        refusal = _refusal(lambda run_dir=run_dir, files=files: _save(run_dir, 3, files))
        if refusal is not None:
            assert "step 3 could not be saved" in refusal
            refused += 1
        _check(run_dir, 3 if refusal is None else 2, (at, files.names_done[-3:]))
    assert refused > total // 2


def test_short_reads_and_writes_are_completed(two_saved: Path):
    total = count_operations(lambda files: _save(_fresh(two_saved, 0), 3, files))
    for at in range(total):
        run_dir = _fresh(two_saved, at + 1)
        _save(run_dir, 3, ShortFiles(at))
        _check(run_dir, 3, at)


def test_a_kill_at_any_operation_loses_nothing(two_saved: Path):
    total = count_operations(lambda files: _save(_fresh(two_saved, 0), 3, files))
    for at in range(total):
        run_dir = _fresh(two_saved, at + 1)
        files = FaultyFiles(at, Killed())
        with pytest.raises(Killed):
            _save(run_dir, 3, files)
        _check(run_dir, 2, (at, files.names_done[-3:]))


def test_a_power_cut_at_any_operation_loses_nothing(two_saved: Path):
    total = count_operations(lambda files: _save(_fresh(two_saved, 0), 3, files))
    for at in range(total + 1):
        for seed in range(3):
            run_dir = _fresh(two_saved, 3 * at + seed + 1)
            files = PowerCutFiles(at)
            acknowledged = 3
            try:
                _save(run_dir, 3, files)
            except Killed:
                acknowledged = 2
            files.cut(random.Random(1000 * at + seed))
            _check(run_dir, acknowledged, (at, seed, files.names_done[-3:]))
    assert acknowledged == 3


def test_the_first_checkpoint_of_a_run_survives_a_power_cut_once_acknowledged(tmp_path: Path):
    for seed in range(10):
        run_dir = tmp_path / f"run{seed}"
        run_dir.mkdir()
        files = PowerCutFiles(10**9)
        _save(run_dir, 1, files)
        files.cut(random.Random(seed))
        _check(run_dir, 1, seed)


def test_an_error_at_any_operation_of_loading_never_gives_wrong_bits(two_saved: Path):
    def load(files: Files) -> int:
        checkpoint = load_checkpoint(two_saved, "auto", files)
        assert checkpoint is not None
        back = make_store(SPEC, "bf16")
        restore(back, checkpoint, files)
        assert stores_equal(back, STORES[checkpoint.step])
        assert (checkpoint.step == 1) == bool(checkpoint.skipped)
        return checkpoint.step

    total = count_operations(load)
    steps = set()
    for at in range(1, total):  # 0 lists the folder
        files = FaultyFiles(at, OSError(errno.EIO, "Input/output error"))
        refusal = _refusal(lambda files=files: steps.add(load(files)))
        assert refusal is None or "cannot be read: Input/output error" in refusal
    assert steps == {1}
    for at in range(total):
        assert load(ShortFiles(at)) == 2

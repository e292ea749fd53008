"""BEST names the best saved step, and pruning spares it, whatever is killed on the way."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatrain.checkpoint import CheckpointWriter, Files, load_checkpoint, save_checkpoint
from tests.checkpoint.checkpoint_cases import fill_random, make_store, tiny_config, tiny_spec
from tests.checkpoint.faults import FaultyFiles, Killed, QuickFiles, count_operations

SPEC = tiny_spec(layers=1, tied=True)
STORE = make_store(SPEC, "bf16")
fill_random(STORE, seed=0)


def save(run_dir: Path, step: int, best_step: int | None, files: Files) -> None:
    """Save `step`, with the best step as training would name it."""

    def write_parts(write_segment: Callable[[str], None]) -> None:
        for segment in SPEC.segments:
            write_segment(segment.name)

    writer = CheckpointWriter(run_dir, STORE, SPEC, tiny_config(tied=True), None, keep=2, run_facts={}, files=files)
    state = {"step": step} if best_step is None else {"step": step, "best_step": best_step}
    save_checkpoint(writer, step, write_parts, state)


def kept(run_dir: Path) -> set[str]:
    return set(os.listdir(run_dir / "checkpoints"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def test_the_best_is_kept_beside_the_newest(folder: Path) -> None:
    for step in (1, 2, 3, 4):
        save(folder, step, 1, QuickFiles())
    assert kept(folder) == {"step-1", "step-3", "step-4"}
    assert (folder / "BEST").read_text() == "checkpoints/step-1\n"
    assert (folder / "LATEST").read_text() == "checkpoints/step-4\n"
    save(folder, 5, 5, QuickFiles())
    assert kept(folder) == {"step-4", "step-5"}, "a best step that is not best any more is pruned like others"
    assert (folder / "BEST").read_text() == "checkpoints/step-5\n"


def test_without_evaluation_there_is_no_best(folder: Path) -> None:
    for step in (1, 2, 3):
        save(folder, step, None, QuickFiles())
    assert kept(folder) == {"step-2", "step-3"}
    assert not (folder / "BEST").exists()


def test_a_best_step_that_was_removed_is_no_error(folder: Path) -> None:
    save(folder, 2, 1, QuickFiles())
    assert not (folder / "BEST").exists()


def test_a_kill_at_any_operation_costs_neither_the_best_nor_the_newest(folder: Path) -> None:
    start = folder / "start"
    start.mkdir()
    for step in (1, 2, 3):
        save(start, step, 1, QuickFiles())

    def fresh(name: str) -> Path:
        shutil.copytree(start, folder / name)
        return folder / name

    total = count_operations(lambda files: save(fresh("count"), 4, 1, files))
    for at in range(total):
        run_dir = fresh(str(at))
        with pytest.raises(Killed):
            save(run_dir, 4, 1, FaultyFiles(at, Killed()))
        assert "step-1" in kept(run_dir), at
        checkpoint = load_checkpoint(run_dir, "auto", QuickFiles())
        assert checkpoint is not None
        assert checkpoint.step >= 3, at
        save(run_dir, 5, 1, QuickFiles())
        assert (run_dir / "BEST").read_text() == "checkpoints/step-1\n"
        assert "step-1" in kept(run_dir), at
        assert not [name for name in os.listdir(run_dir) if ".tmp-" in name], at
        shutil.rmtree(run_dir)

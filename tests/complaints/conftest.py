"""One finished run of a tiny model, from which most complaints can be answered."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.test_verbs import megatrain
from tests.conftest import write_run_config

STEPS = 4


def write_config(folder: Path, model: Path) -> Path:
    """A config of a run of `STEPS` steps, saved and evaluated every 2, whose rows differ in length."""
    return write_run_config(
        folder, model, f"train_batch_size: 8\nmax_steps: {STEPS}\neval_steps: 2\npacking: false\n"
    )


@pytest.fixture(scope="session")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a config, `run.yaml`, and of its finished run, `run`. Not to be changed."""
    folder = tmp_path_factory.mktemp("complaints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert megatrain("train", write_config(folder, tiny_model)) == 0
    return folder


@pytest.fixture
def config(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same config for a run of its own, in `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(finished / "cache"))
    text = (finished / "run.yaml").read_text("utf-8").replace(f"output_dir: {finished}", f"output_dir: {tmp_path}")
    (tmp_path / "run.yaml").write_text(text, "utf-8")
    return tmp_path / "run.yaml"


@pytest.fixture
def stopped(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run as if it had been killed after step 2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(finished / "cache"))
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS}")
    return run

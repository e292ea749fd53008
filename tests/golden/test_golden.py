"""The golden runs come out as committed for this environment; where none is committed, that is said and counted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden.runs import FAMILIES, FOLDER, PINNED, STEPS, environment, path_of

ROOT = Path(__file__).parents[2]
FAST_STEPS = 8


def played(device: str, num_steps: int) -> dict[str, Any]:
    """The first steps of all runs, in a process with the pinned environment; its own environment, too."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden", "--device", device, "--steps", str(num_steps)],
        cwd=ROOT, env=os.environ | PINNED, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def committed(key: dict[str, str]) -> dict[str, Any]:
    path = path_of(key)
    if not path.exists():
        pytest.skip(f"no golden runs for {' '.join(key.values())}; `python -m tests.golden --write` makes {path.name}")
    return json.loads(path.read_text("utf-8"))


def compare(device: str, num_steps: int) -> None:
    found = played(device, num_steps)
    wanted = committed(found["environment"])
    for family in FAMILIES:
        ours, theirs = found["runs"][family], wanted["runs"][family]
        losses = theirs["losses"][:num_steps]
        first = next((step for step, (a, b) in enumerate(zip(ours["losses"], losses, strict=True)) if a != b), None)
        assert first is None, f"{family}: the loss of step {first} is {ours['losses'][first]}, was {losses[first]}"
        assert num_steps < STEPS or ours["sha256"] == theirs["sha256"], f"{family}: same losses, another final state"


def test_the_first_steps_are_the_golden_ones() -> None:
    compare("cpu", FAST_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whole_runs_are_the_golden_ones() -> None:
    compare("cpu", STEPS)


@pytest.mark.gpu
@pytest.mark.timeout(1800)
def test_whole_runs_on_a_gpu_are_the_golden_ones() -> None:
    committed(environment("cuda"))
    compare("cuda", STEPS)


def test_what_is_committed_is_whole_and_learns() -> None:
    paths = sorted(FOLDER.glob("*.json"))
    assert paths
    for path in paths:
        found = json.loads(path.read_text("utf-8"))
        assert path_of(found["environment"]) == path
        assert list(found["runs"]) == list(FAMILIES)
        for family, run in found["runs"].items():
            losses = [float.fromhex(loss) for loss in run["losses"]]
            assert len(losses) == STEPS
            assert all(map(math.isfinite, losses))
            assert sum(losses[-10:]) < 0.8 * sum(losses[:10]), f"{path.name}: {family} learns nothing"
            assert len(run["sha256"]) == 64


def test_the_key_tells_the_framework_and_the_processor() -> None:
    key = environment("cpu")
    assert key["torch"] == torch.__version__.split("+")[0]
    assert torch.backends.cpu.get_cpu_capability() in key["device"]

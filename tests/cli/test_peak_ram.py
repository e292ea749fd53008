"""A run with barely enough `memory.ram`, seen from outside: as it loads, steps and saves it never takes more than that.

Optimizer state and weights live on disk. What the program takes before the model is there differs from machine to
machine and from what the account puts down for it, so beside the budget what the run adds to that is held, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cli.test_verbs import megatrain
from tests.conftest import write_rows

MIB = 1 << 20
SPARE = 0.95  # of a budget that is planned with


@pytest.fixture
def config(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a run of two steps and a save, over 23M parameters: 352 MiB of weights, gradients and state."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = LlamaConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(model).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", 40)
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {tmp_path}/model\ndataset: {tmp_path}/train.jsonl\noutput_dir: {tmp_path}/run\nmax_length: 64\n"
        "micro_batch_tokens: 64\ntrain_batch_size: 2\nmax_steps: 2\nsave_steps: 2\nactivations: recompute\n"
        "device: cpu\n"
    )
    yield path
    for folder in ("run", "model"):
        shutil.rmtree(tmp_path / folder)  # half a GiB


@dataclass(frozen=True)
class Watched:
    """Bytes of RAM that a run took: before its model is loaded, and the peak until a line of its output or its end."""

    program: int
    peaks: dict[str, int]


def watched(log: Path, *words: object) -> Watched:
    """Runs `megatrain WORDS` in a process of its own, its memory looked at as the system tells it."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    program, peaks, lines = 0, {}, {"load and step 1": "\nstep 1 ", "step 2": "\nstep 2 ", "save": "\nsaved step 2"}
    with log.open("wb") as out:
        command = [sys.executable, "-m", "megatrain", *map(str, words)]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
    while process.poll() is None:
        said, status = log.read_text(), Path(f"/proc/{process.pid}/status").read_text()
        memory = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in status.splitlines() if "Vm" in line}
        if "VmHWM" in memory:  # it has not ended
            if not program and "verdict: FITS" in said:
                program = memory["VmRSS"]
            peaks |= {name: memory["VmHWM"] for name, line in lines.items() if line not in said}
            peaks["end"] = memory["VmHWM"]
        time.sleep(0.005)
    assert process.returncode == 0, log.read_text()
    return Watched(program, peaks)


def in_ram(table: dict[str, Any]) -> dict[str, int]:
    """Component -> bytes, of what `plan --json` or plan.json says."""
    return {row["component"]: row["num_bytes"] for row in table["memory"] if row["tier"] == "ram"}


def test_a_run_never_takes_more_ram_than_its_budget(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("plan", config, "--json") == 0
    roomy = in_ram(json.loads(capsys.readouterr().out))
    landing_bytes = roomy["shared weight slots"] * 3 // 2  # of one block: weights, m and v
    least_bytes = sum(roomy.values()) - roomy["weights"] - roomy["optimizer state"] + landing_bytes
    budget_bytes = int(least_bytes / SPARE) + 1
    run = watched(tmp_path / "log", "train", config, f"memory.ram={budget_bytes}B")
    table = json.loads((tmp_path / "run/plan.json").read_text())
    on_disk_bytes = sum(row["num_bytes"] for row in table["memory"] if row["component"].endswith("on disk"))
    planned = in_ram(table)
    added_bytes = sum(planned.values()) - planned["program and libraries"]
    assert on_disk_bytes > 0.8 * (roomy["weights"] + roomy["optimizer state"])
    assert list(run.peaks) == ["load and step 1", "step 2", "save", "end"]
    assert run.program > 100 * MIB
    for phase, peak_bytes in run.peaks.items():
        said = f"{phase}: {peak_bytes / MIB:.0f} MiB, of them {run.program / MIB:.0f} before the model is loaded"
        assert peak_bytes <= budget_bytes, said
        assert peak_bytes - run.program <= added_bytes, f"{said}; planned are {added_bytes / MIB:.0f} more"
    assert run.peaks["end"] - run.program + on_disk_bytes / 2 > added_bytes, "half of it in RAM would be seen"

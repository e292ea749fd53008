"""Runs that stop early: by a signal, by a NaN, by damage. Nothing that was said to be saved is lost."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatrain.cli.main import main
from megatrain.config import RunConfig
from megatrain.data import MicroBatch
from megatrain.models.batch import TokenBatch
from megatrain.optim import AdamW, LearningRateSchedule
from megatrain.train import loop
from megatrain.train.loop import hyper_of, token_batches
from megatrain.train.signals import StopRequest


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`, in this process."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def started(*words: object) -> subprocess.Popen[str]:
    """A `megatrain` process whose first step is done."""
    command = [sys.executable, "-c", "from megatrain.cli.main import main; main()", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 1 "):
            return process
    raise AssertionError(process.communicate()[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_and_saves(run_config: Path, tmp_path: Path, number: signal.Signals) -> None:
    process = started("train", run_config, "max_steps=100000", "save_steps=100000", "eval_steps=100000")
    process.send_signal(number)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "finishing this step and saving" in error
    saved = int(out.rsplit("saved step ", 1)[1].split()[0])
    run = tmp_path / "run"
    assert (run / "LATEST").read_text().strip() == f"checkpoints/step-{saved}"
    assert out.endswith(f"stopped after step {saved}; go on with: megatrain resume {run}\n")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["step"] for row in rows) == saved
    allow = ("--allow", "max_steps")
    assert megatrain("resume", run, f"max_steps={saved + 1}", *allow) == 0
    assert (run / f"checkpoints/step-{saved + 1}").is_dir()


def test_a_signal_where_nothing_is_ever_saved_promises_no_resume(
    run_config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def signalled(micro_batches: Sequence[MicroBatch]) -> list[TokenBatch]:
        signal.raise_signal(signal.SIGINT)
        return token_batches(micro_batches)

    monkeypatch.setattr(loop, "token_batches", signalled)
    words = ("max_steps=100", "save_strategy=no", "eval_steps=null", "eval_dataset=")
    assert megatrain("train", run_config, *words) == 128 + signal.SIGINT
    assert capsys.readouterr().out.endswith("stopped after step 1; nothing was saved (save_strategy: no)\n")


@pytest.mark.parametrize(
    "words",
    [
        ("max_steps=1",),
        ("max_steps=1", "save_strategy=no", "eval_steps=null", "eval_dataset="),
        ("max_steps=100", "eval_steps=1", "early_stopping_patience=1", "early_stopping_threshold=100"),
    ],
    ids=["saves", "saves nothing", "stops early"],
)
def test_a_signal_in_the_last_step_stops_nothing(
    run_config: Path, words: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def signalled(config: RunConfig, schedule: LearningRateSchedule, index: int) -> AdamW:
        signal.raise_signal(signal.SIGTERM)
        return hyper_of(config, schedule, index)

    monkeypatch.setattr(loop, "hyper_of", signalled)
    assert megatrain("train", run_config, *words) == 0
    shown = capsys.readouterr().out
    assert "stopped after" not in shown
    assert "resume" not in shown
    (model,) = re.findall("^model: (.*)$", shown, re.MULTILINE)[-1:]
    assert list(Path(model).glob("*.safetensors"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_when_nobody_reads_any_more(run_config: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C ends `| tee log` as well; a hang-up comes with a lost terminal."""
    process = started("train", run_config, "max_steps=100000", "save_steps=100000", "eval_steps=100000")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.send_signal(number)
    assert process.wait(timeout=120) == 128 + number
    run = tmp_path / "run"
    saved = int((run / "LATEST").read_text().strip().rpartition("-")[2])
    assert f"saved step {saved}" in (run / "log.txt").read_text()


def test_a_run_goes_on_when_its_reader_ends(run_config: Path, tmp_path: Path) -> None:
    process = started("train", run_config)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=120) == 0
    assert process.stderr.read() == ""
    process.stderr.close()
    assert "saved step 6" in (tmp_path / "run/log.txt").read_text()


def test_a_hang_up_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_second_signal_aborts_at_once(run_config: Path, tmp_path: Path) -> None:
    process = started("train", run_config, "max_steps=100000", "eval_steps=1", "save_steps=1")
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "Traceback" not in error
    assert megatrain("resume", tmp_path / "run", "max_steps=100000", "memory.ram=1MiB") == 2  # the lock is free


def test_nan_stops_with_names_and_keeps_what_was(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config, "learning_rate=1e30", "eval_steps=100") == 2
    captured = capsys.readouterr()
    assert "step 2: loss " in captured.err
    assert "gradient norm nan are not finite, first in model." in captured.err
    assert "samples " in captured.err
    assert "set on_nan: skip" in captured.err
    assert "saved step 1" in captured.out
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["grad_norm"] for row in rows if row["step"] == 2] == ["nan"]


def test_skipped_steps_change_nothing_and_do_not_count(run_config: Path, tmp_path: Path) -> None:
    words = ("learning_rate=1e30", "on_nan=skip", "eval_steps=100", "save_total_limit=9")
    assert megatrain("train", run_config, *words) == 2, "it diverged, and says so"
    folders = [tmp_path / f"run/checkpoints/step-{step}" for step in (2, 6)]
    states = [json.loads((folder / "state/trainer.json").read_text()) for folder in folders]
    assert [(state["applied_steps"], state["step"]) for state in states] == [(1, 2), (1, 6)]
    for file in folders[0].glob("**/*.safetensors"):
        before, after = load_file(file), load_file(folders[1] / file.relative_to(folders[0]))
        assert all(
            (before[name].view(-1).numpy().tobytes() == after[name].view(-1).numpy().tobytes()) for name in before
        )


def test_a_damaged_checkpoint_is_passed_over(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config) == 0
    shard = next((tmp_path / "run/checkpoints/step-6").glob("state/L000.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(data)
    assert megatrain("resume", tmp_path / "run") == 0
    shown = capsys.readouterr().out
    assert "passed over: " in shown
    assert "going on after step 4" in shown
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]

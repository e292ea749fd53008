"""Promises that no single room keeps: killed runs, surroundings that change nothing, no network, no secrets."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatrain.checkpoint import load_checkpoint
from tests.cli.test_verbs import bits, megatrain, metrics

COMMAND = "from megatrain.cli.main import main; main()"
SETTINGS = ("max_steps=12", "save_steps=1", "eval_steps=4")


def same_run(one: Path, other: Path, step: int) -> bool:
    """Whether two runs have the same losses and norms in every step, and the same bits after `step`."""
    left, right = bits(one, step), bits(other, step)
    same_bits = left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)
    return same_bits and metrics(one) == metrics(other)


def kill_after_a_save(words: list[str], wait_s: float) -> int:
    """Start `megatrain WORDS`, SIGKILL it `wait_s` after it acknowledged a step; that step, or 0 if it ended before."""
    command = [sys.executable, "-c", COMMAND, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        acknowledged = 0
        for line in process.stdout:
            if line.startswith("saved step "):
                acknowledged = int(line.split()[2])
                time.sleep(wait_s)
                break
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()  # what was said before the kill came counts as said
    for line in rest.splitlines():
        if line.startswith("saved step ") and line.split()[2].isdecimal():
            acknowledged = int(line.split()[2])
    return acknowledged


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_never_was(run_config: Path, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert megatrain("train", run_config, *SETTINGS, f"output_dir={whole}") == 0
    waits = random.Random(0)
    kills = 0
    for _ in range(3):
        acknowledged = kill_after_a_save(["train", str(run_config), *SETTINGS], waits.random() * 0.1)
        newest = load_checkpoint(run, "auto")
        assert newest is not None
        assert newest.step >= acknowledged > 0
        assert newest.skipped == ()
        kills += newest.step < 12
    assert kills, "every process ended before it was killed"
    assert megatrain("resume", run) == 0
    assert same_run(run, whole, 12)


def test_surroundings_change_no_bit(run_config: Path, tmp_path: Path) -> None:
    """Asserts off, the C locale, another folder, time zone, hash seed and number of optimizer threads."""
    assert megatrain("train", run_config, f"output_dir={tmp_path}/plain", "optimizer_threads=1") == 0
    (tmp_path / "elsewhere").mkdir()
    strange = {"LC_ALL": "C", "LANG": "C", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "7", "COLUMNS": "20"}
    words = ["train", str(run_config), "optimizer_threads=5", "output_dir=run"]
    subprocess.run(
        [sys.executable, "-O", "-c", COMMAND, *words],
        env=os.environ | strange,
        cwd=tmp_path / "elsewhere",
        check=True,
        stdout=subprocess.DEVNULL,
    )
    assert same_run(tmp_path / "elsewhere/run", tmp_path / "plain", 6)


def test_nothing_is_fetched_and_nothing_secret_is_kept(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def refuse(*where: object, **_: object) -> None:
        asked.append(where)
        raise OSError("no network in this test")

    for name in ("connect", "connect_ex", "bind", "listen"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "s3cr3t-t0k3n")
    run = tmp_path / "run"
    assert megatrain("data", "preview", run_config) == 0
    assert megatrain("train", run_config, "max_steps=2") == 0
    assert megatrain("resume", run, "save_steps=1") == 0
    assert megatrain("export", run, tmp_path / "out") == 0
    assert asked == []
    shown = capsys.readouterr()
    assert "s3cr3t" not in shown.out + shown.err
    files = [path for folder in (run, tmp_path / "out", tmp_path / "cache") for path in folder.rglob("*")]
    assert len(files) > 20
    assert not [path for path in files if path.is_file() and b"s3cr3t" in path.read_bytes()]
    assert json.loads((run / "plan.json").read_text())["verdict"] == "FITS"


def test_the_program_can_be_seen_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The net above has no holes: a connection by the standard library is one of the calls it replaces."""
    asked: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda _self, where: asked.append(where))
    socket.create_connection(("127.0.0.1", 9)).close()
    assert asked == [("127.0.0.1", 9)]

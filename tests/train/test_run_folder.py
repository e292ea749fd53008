"""The run folder: private, owned by one run, its files whole; metrics say everything; the loop's arithmetic."""

from __future__ import annotations

import fcntl
import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest
import torch

from megatrain.config import RunConfig, resolved
from megatrain.data import MicroBatch, StepBatch
from megatrain.engine import StepResult
from megatrain.errors import ConfigError, UserError
from megatrain.models.flops import train_flops
from megatrain.models.spec import AttentionShape, ModelSpec, SegmentSpec, TensorSpec
from megatrain.schedule.plan import Activations, Plan, SegmentPlan
from megatrain.train.loop import hyper_of, lr_schedule
from megatrain.train.metrics import Metrics, Work, document_lengths, written_bytes
from megatrain.train.progress import PlainDisplay
from megatrain.train.run_folder import RunFolder, replace_text

CONFIG = resolved(RunConfig(model="m", dataset="d", max_length=8, train_batch_size=1), "cpu", 1)


def test_the_folder_is_private_and_owned(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with RunFolder(path) as folder:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert (path / ".lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(UserError, match=f"in use by another run \\(process {os.getpid()}\\)"):
            RunFolder(path)
        folder.begin(CONFIG, {"plan": 1}, {"torch": "2"})
        assert stat.S_IMODE(folder.config.stat().st_mode) == 0o600
        assert json.loads((path / "plan.json").read_text()) == {"plan": 1}
        folder.refuse_changes(CONFIG, frozenset())
    with RunFolder(path):
        assert not list(path.glob("*.part"))


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be used: "):
        RunFolder(tmp_path / "file")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be used: "):
        RunFolder(tmp_path / "run")
    assert (tmp_path / "file").read_text() == "x"


def test_metrics_after_the_saved_step_are_cut(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.cut_metrics(3)
        lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)]
        folder.metrics.write_text("".join(lines) + '{"step": 5, "lo')
        folder.cut_metrics(2)
        assert folder.metrics.read_text() == "".join(lines[:2])
        folder.metrics.write_bytes(lines[0].encode() + b"\x00" * 64 + b"\n[1]\n\xff\n" + lines[1].encode())
        folder.cut_metrics(2)
        assert folder.metrics.read_text() == "".join(lines[:2])
        folder.cut_metrics(0)
        assert folder.metrics.read_text() == ""


def test_a_torn_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    replace_text(path, "old")

    def torn(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", torn)
    with pytest.raises(OSError, match="disk full"):
        replace_text(path, "new")
    assert path.read_text() == "old"


def micro_batch(lengths: list[int], size: int) -> MicroBatch:
    ids = np.repeat(np.arange(len(lengths) + 1), [*lengths, size - sum(lengths)]).astype(np.int32)
    zeros = np.zeros(size, np.int64)
    return MicroBatch(zeros, zeros, ids, zeros, sum(lengths), sum(lengths), tuple(range(len(lengths))))


def small_spec() -> ModelSpec:
    tensor = TensorSpec("w", "w", (4, 4), trainable=True, decay=True)
    segments = (
        SegmentSpec("EMBED", "embed", ()),
        SegmentSpec("L000", "block", (tensor,)),
        SegmentSpec("HEAD", "head", ()),
    )
    return ModelSpec("X", segments, False, 4, 4, (AttentionShape(1, 4, None),), 16, 64)


def small_plan(block: Activations, clip_mode: Literal["deferred", "two-pass"] = "deferred") -> Plan:
    kinds: dict[str, Literal["embed", "block", "head"]] = {"EMBED": "embed", "L000": "block", "HEAD": "head"}
    segments = [SegmentPlan(name, kind, trainable=True) for name, kind in kinds.items()]
    segments[1] = replace(segments[1], activations=block)
    return Plan(tuple(segments), False, 1, 1, 1, clip_mode=clip_mode)


def test_figures_count_real_tokens(tmp_path: Path) -> None:
    batch = StepBatch((micro_batch([3, 4], 8), micro_batch([5], 8)), 12, 12)
    assert document_lengths(batch) == [3, 4, 5]
    spec = small_spec()
    figures = Work(spec, small_plan("keep"), 1e6).figures(batch, 2.0)
    assert figures["mfu"] == pytest.approx(train_flops(spec, [3, 4, 5]) / 2.0 / 1e6)
    assert figures["hfu"] > figures["mfu"], "padding is work"
    hfu = {way: Work(spec, small_plan(way), 1e6).figures(batch, 2.0)["hfu"] for way in get_args(Activations)}
    assert hfu["recompute"] == hfu["offload"] > hfu["keep_attention"] > hfu["keep"], "recomputing is work"
    twice = Work(spec, small_plan("keep", "two-pass"), 1e6).figures(batch, 2.0)
    assert twice["hfu"] == pytest.approx(2 * figures["hfu"])
    assert Work(spec, small_plan("recompute"), None).figures(batch, 2.0)["mfu"] is None
    result = StepResult(math.nan, math.inf, False, "w", 1.0, {"compute": 0.5, "disk": 0.0})
    work = Work(spec, small_plan("keep"), None)
    with Metrics(
        tmp_path / "m", tmp_path / "l", PlainDisplay(), torch.device("cpu"), work, logging_steps=2, num_steps=4
    ) as metrics:
        for step in (1, 2):
            metrics.step(step, batch, 0.25, result, 2.0)
    rows = [json.loads(line) for line in (tmp_path / "m").read_text().splitlines()]
    assert [(row["loss"], row["grad_norm"], row["applied"]) for row in rows] == [("nan", "inf", False)] * 2
    assert rows[0]["tokens_per_s"] == 6.0
    assert [line.split()[:2] for line in (tmp_path / "l").read_text().splitlines()] == [["step", "2"]]


def test_a_disk_that_takes_no_more_lines_is_one_sentence(tmp_path: Path) -> None:
    work = Work(small_spec(), small_plan("keep"), None)
    full = Path("/dev/full")
    for jsonl, log in ((full, tmp_path / "l"), (tmp_path / "m", full)):
        with Metrics(jsonl, log, PlainDisplay(), torch.device("cpu"), work, logging_steps=1, num_steps=1) as metrics:
            message = "/dev/full cannot be written: No space left on device; free disk space, then megatrain resume"
            with pytest.raises(UserError, match=message):
                metrics.evaluation(1, 0.5, 3)
    assert (tmp_path / "m").read_text() == ""


def test_a_start_that_fails_takes_its_files_along(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with RunFolder(path) as folder:
        folder.begin(CONFIG, {}, {})
    assert list(tmp_path.iterdir()) == []
    with RunFolder(path) as folder:
        folder.begin(CONFIG, {}, {})
        folder.started()
    before = sorted(path.iterdir())
    with RunFolder(path) as folder:
        folder.begin(CONFIG, {}, {})
    assert sorted(path.iterdir()) == before


def test_a_lock_that_was_removed_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed start removes its lock; who opened that file before must not think it owns the folder."""
    before = fcntl.flock

    def removed_meanwhile(lock: int, how: int) -> None:
        (tmp_path / "run" / ".lock").unlink()
        before(lock, how)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with pytest.raises(UserError, match="in use by another run"):
        RunFolder(tmp_path / "run")


def test_written_bytes_reads_the_right_line(tmp_path: Path) -> None:
    path = tmp_path / "io"
    path.write_text("wchar: 9\nread_bytes: 7\nwrite_bytes: 5\ncancelled_write_bytes: 3\n")
    assert written_bytes(path) == 5
    assert written_bytes(tmp_path / "none") is None


def test_learning_rate_of_a_step() -> None:
    config = CONFIG.model_copy(update={"learning_rate": 2.0, "warmup_steps": 2, "lr_scheduler_type": "linear"})
    schedule = lr_schedule(config, 6)
    rates = [hyper_of(config, schedule, index).learning_rate for index in range(6)]
    assert rates == [0.0, 1.0, 2.0, 1.5, 1.0, 0.5]
    assert hyper_of(config, schedule, 0).beta2 == config.adam_beta2

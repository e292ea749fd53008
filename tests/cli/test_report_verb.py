"""`megatrain report` on a real run: the page, its samples, and what it leaves alone."""

from __future__ import annotations

import hashlib
import json
import stat
import sys
from pathlib import Path

import pytest

from megatrain.cli.main import main


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def contents(run: Path) -> dict[str, str]:
    """File -> hash, of everything outside report/."""
    files = [path for path in run.rglob("*") if path.is_file() and "report" not in path.relative_to(run).parts]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_report_is_written_beside_the_run(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config) == 0
    run = tmp_path / "run"
    before = contents(run)
    assert megatrain("report", run) == 0
    index = run / "report/index.html"
    assert f"report: {index}" in capsys.readouterr().out
    assert stat.S_IMODE(index.stat().st_mode) == 0o600
    text = index.read_text("utf-8")
    losses = [row["loss"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert f"<b>{losses[-1]:.3f}</b>" in text
    assert "../checkpoints/step-6/model/" in text
    assert "Samples" not in text
    assert megatrain("report", run) == 0, "again, over the old one"
    assert contents(run) == before


def test_samples_are_what_chat_says_before_and_after(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config, "max_steps=60", "learning_rate=5e-3", "save_steps=60") == 0
    run = tmp_path / "run"
    said = {}
    for step in ("base", "latest"):
        capsys.readouterr()
        words = ("--max-tokens", "96", "--temperature", "0")
        assert megatrain("chat", run, "--step", step, "--prompt", "the cat sat on", *words) == 0
        said[step] = capsys.readouterr().out
    assert megatrain("report", run, "--prompt", "the cat sat on", "--prompt", "a dog") == 0
    samples = json.loads((run / "report/samples.json").read_text())["samples"]
    assert [(s["step"], s["prompt"]) for s in samples] == [
        (0, "the cat sat on"),
        (0, "a dog"),
        (60, "the cat sat on"),
        (60, "a dog"),
    ]
    shown = {s["step"]: "".join(c for c in s["text"] if c in "\n\t" or c.isprintable()) for s in samples[::2]}
    said = {step: "".join(c for c in text if c in "\n\t" or c.isprintable()) for step, text in said.items()}
    assert shown[0] + "\n" == said["base"]
    assert shown[60] + "\n" == said["latest"]
    assert shown[0] != shown[60]
    assert megatrain("report", run) == 0
    assert "after step 60" in (run / "report/index.html").read_text(), "samples stay until others are asked for"


def test_mistakes_end_in_one_sentence(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, said in ((tiny_model, "a report is made of a run folder"), (tmp_path, "is neither a run folder")):
        assert megatrain("report", path) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
    assert not (tiny_model / "report").exists()

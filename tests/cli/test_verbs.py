"""The command line as a person uses it, in this process, on a tiny model."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.cli.main import main
from megatrain.train import RunFolder


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def metrics(run: Path) -> list[dict[str, object]]:
    """The rows of metrics.jsonl that are steps, without the figures of the clock and the machine."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = ("step_s", "tokens_per_s", "model_tflops", "mfu", "hfu", "lanes", "peak_ram_bytes", "disk_written_bytes")
    return [{k: v for k, v in row.items() if k not in clock} for row in rows if "loss" in row]


def bits(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, as integers."""
    folder = run / "checkpoints" / f"step-{step}"
    files = [*folder.glob("model/*.safetensors"), *folder.glob("state/*.safetensors")]
    return {k: t.view(torch.int32) for f in files for k, t in load_file(f).items()}


def test_train_leaves_a_run_folder_and_learns(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config) == 0
    run, shown = tmp_path / "run", capsys.readouterr().out
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert [row["step"] for row in rows if "eval_loss" in row] == [0, 3, 6]
    assert losses[2] < losses[1] < losses[0] < 6.0
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4, 5, 6]
    wanted = [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "tokens",
        "supervised_tokens",
        "step_s",
        "tokens_per_s",
        "model_tflops",
        "mfu",
        "hfu",
        "lanes",
    ]
    assert set(wanted) <= set(next(row for row in rows if "loss" in row))
    assert "saved step 6" in shown
    assert shown == (run / "log.txt").read_text()
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-4", "step-6"]
    assert stat.S_IMODE(os.stat(run).st_mode) == 0o700
    assert json.loads((run / "plan.json").read_text())["verdict"] == "FITS"
    assert json.loads((run / "env.json").read_text())["torch"] == torch.__version__
    model = AutoModelForCausalLM.from_pretrained(run / "checkpoints/step-6/model")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert AutoTokenizer.from_pretrained(run / "checkpoints/step-6/model").chat_template


def test_resume_has_the_bits_of_a_run_never_stopped(run_config: Path, tmp_path: Path) -> None:
    assert megatrain("train", run_config) == 0
    whole, run = tmp_path / "whole", tmp_path / "run"
    run.rename(whole)
    assert megatrain("train", run_config, "max_steps=4", "lr_scheduler_type=constant") == 0
    allow = ("--allow", "max_steps", "--allow", "lr_scheduler_type")
    assert megatrain("resume", run, "max_steps=6", "lr_scheduler_type=constant", *allow) == 0
    run.rename(tmp_path / "stopped")
    assert megatrain("train", run_config, "lr_scheduler_type=constant") == 0
    assert metrics(run) == metrics(tmp_path / "stopped")
    assert metrics(run) != metrics(whole)
    one, other = bits(run, 6), bits(tmp_path / "stopped", 6)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_folder_may_have_any_name(run_config: Path, tmp_path: Path) -> None:
    odd = tmp_path / "run #1: 'a', {b}"
    assert megatrain("train", run_config, "max_steps=2") == 0
    (tmp_path / "run").rename(odd)
    assert megatrain("resume", odd, "max_steps=2") == 0
    assert megatrain("export", odd, tmp_path / "out") == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").num_parameters() > 0


def test_resume_refuses_changes_by_name(run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("train", run_config, "max_steps=2") == 0
    assert megatrain("resume", tmp_path / "run", "max_steps=4") == 2
    assert "max_steps is 4, but the run in" in capsys.readouterr().err
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[1:]))
    assert megatrain("resume", tmp_path / "run", "save_steps=1") == 2
    assert "data is '" in capsys.readouterr().err
    assert megatrain("resume", tmp_path) == 2
    assert "is no run folder" in capsys.readouterr().err
    assert megatrain("train", run_config, "max_steps=2", "resume_from_checkpoint=never") == 2
    assert "already holds step 2" in capsys.readouterr().err


def test_a_second_run_in_the_same_folder_is_refused(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunFolder(tmp_path / "run"):
        assert megatrain("train", run_config) == 2
    assert f"in use by another run (process {os.getpid()})" in capsys.readouterr().err
    assert megatrain("train", run_config, "max_steps=1") == 0


def test_plan_prints_and_refuses(run_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("plan", run_config, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["verdict"] == "FITS"
    assert sum(row["num_bytes"] for row in shown["memory"] if row["tier"] == "ram") == shown["totals"]["ram"]
    assert shown["misfit"] is None
    assert megatrain("plan", run_config, "memory.ram=1MiB") == 1
    shown = capsys.readouterr().out
    assert "verdict: NO" in shown
    assert "the smallest budget that would do is memory.ram: " in shown.splitlines()[-1]
    assert megatrain("train", run_config, "memory.ram=1MiB") == 2
    assert "the smallest budget that would do is memory.ram: " in capsys.readouterr().err


def test_mistakes_end_in_one_sentence(run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["train", tmp_path / "none.yaml"], ["train", run_config, "lr=fast"], ["plan", run_config, "model=x"]):
        assert megatrain(*words) == 2
        error = capsys.readouterr().err
        assert error.startswith("megatrain: ")
        assert error.count("\n") == 1
        assert "Traceback" not in error
    assert megatrain("train", run_config, "max_length=4096", "micro_batch_tokens=4096") == 2
    assert "the model knows 128 positions" in capsys.readouterr().err


def test_export_and_the_final_model(run_config: Path, tmp_path: Path) -> None:
    assert megatrain("train", run_config, "max_steps=2") == 0
    assert megatrain("export", tmp_path / "run", tmp_path / "out", "--dtype", "float32") == 0
    saved = load_file(tmp_path / "out/model.safetensors")
    assert saved["model.norm.weight"].dtype == torch.float32
    exact = bits(tmp_path / "run", 2)
    assert all(torch.equal(tensor.view(torch.int32), exact[name]) for name, tensor in saved.items())
    assert megatrain("train", run_config, "max_steps=2", "save_strategy=no", f"output_dir={tmp_path}/plain") == 0
    plain = load_file(tmp_path / "plain/model/model.safetensors")
    assert all(torch.equal(plain[name], saved[name]) for name in saved)


def test_data_preview_marks_what_is_trained(run_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("data", "preview", run_config) == 0
    shown = capsys.readouterr().out
    assert "format messages: 40 rows read, 40 used" in shown
    assert "⟦" in shown
    assert "<|im_end|>⟧" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("--version") == 0
    assert capsys.readouterr().out.startswith("megatrain 0.")


def test_an_early_interrupt_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a run listens for signals."""

    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatrain.cli.main.app", interrupted)
    assert megatrain("plan", "my.yaml") == 130
    assert capsys.readouterr().err == "megatrain: interrupted\n"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_damaged_model_folder_is_one_sentence(
    tiny_model: Path, run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / name).write_text("{")
    assert megatrain("train", run_config, f"model={folder}") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"megatrain: {folder}")
    assert error.count("\n") == 1


def test_a_terminal_without_utf8_shows_question_marks(run_config: Path) -> None:
    command = [sys.executable, "-c", "from megatrain.cli.main import main; main()", "data", "preview", str(run_config)]
    shown = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert shown.returncode == 0, shown.stderr
    assert "?" in shown.stdout

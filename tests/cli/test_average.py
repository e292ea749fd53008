"""`ema_decay` as a person uses it: kept in checkpoints, resumed bit for bit, begun and dropped on purpose, exported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatrain.store import split_master
from tests.cli.test_disk_run import model_of, plan_on_disk, same
from tests.cli.test_export import state_of
from tests.cli.test_verbs import bits, megatrain

KEEP = "ema_decay=0.75"  # a power of two: what the average is can be told from two checkpoints in plain arithmetic


def averages_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Parameter -> its average, as the checkpoint's own files hold it."""
    files = (run / f"checkpoints/step-{step}/state").glob("*.safetensors")
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    return {name.removeprefix("ema."): value for name, value in tensors.items() if name.startswith("ema.")}


def masters_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    return {name: held["master"] for name, held in state_of(run, step).items()}


def after_a_step(averages: dict[str, torch.Tensor], masters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: old + (masters[name] - old) * 0.25 for name, old in averages.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_checkpoints_hold_it_and_a_resume_goes_on_with_its_bits(
    run_config: Path, tmp_path: Path, precision: str
) -> None:
    words = (KEEP, f"precision={precision}", "save_steps=1", "save_total_limit=9")
    assert megatrain("train", run_config, *words, f"output_dir={tmp_path}/whole") == 0
    assert megatrain("train", run_config, *words) == 0
    whole, run = tmp_path / "whole", tmp_path / "run"
    for step in (4, 5, 6):
        shutil.rmtree(run / f"checkpoints/step-{step}")
    assert megatrain("resume", run) == 0
    assert same(bits(run, 6), bits(whole, 6))
    assert any(name.startswith("ema.") for name in bits(run, 6)), "or the line above compares no average"
    base = {n: t.float() for f in model_of(run_config).glob("*.safetensors") for n, t in load_file(f).items()}
    found = {name: base[name] for name in averages_of(whole, 1)}
    assert found.keys() == state_of(whole, 1).keys()
    for step in range(1, 7):
        found = after_a_step(found, masters_of(whole, step))
        assert same(averages_of(whole, step), found), step


def test_it_changes_no_weight_and_lives_on_disk_too(run_config: Path, tmp_path: Path) -> None:
    plan = plan_on_disk(model_of(run_config), tmp_path / "plan.json")
    assert megatrain("train", run_config, f"output_dir={tmp_path}/without") == 0
    assert megatrain("train", run_config, KEEP) == 0
    assert megatrain("train", run_config, KEEP, f"output_dir={tmp_path}/disk", "--plan", plan) == 0
    assert same(bits(tmp_path / "disk", 6), bits(tmp_path / "run", 6))
    kept = {name: value for name, value in bits(tmp_path / "run", 6).items() if not name.startswith("ema.")}
    assert same(kept, bits(tmp_path / "without", 6))
    assert megatrain("eval", tmp_path / "run") == 0, "what reads weights alone has no place for an average"
    assert megatrain("chat", tmp_path / "run", "--prompt", "a", "--max-tokens", "2") == 0
    assert megatrain("export", tmp_path / "run", tmp_path / "dcp", "--format", "dcp") == 0


def test_it_begins_and_ends_in_a_run_only_on_purpose(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert megatrain("train", run_config, "max_steps=2", "lr_scheduler_type=constant") == 0
    more = ("--allow", "max_steps")
    capsys.readouterr()
    assert megatrain("resume", run, KEEP, "max_steps=3", *more) == 2
    error = capsys.readouterr().err
    assert "ema_decay is 0.75, but the run in" in error
    assert "resume with --allow ema_decay" in error
    assert error.count("\n") == 1
    start = masters_of(run, 2)
    assert megatrain("resume", run, KEEP, "max_steps=3", *more, "--allow", "ema_decay") == 0
    assert "the average of the weights starts at those of step 2, which has none" in capsys.readouterr().out
    assert same(averages_of(run, 3), after_a_step(start, masters_of(run, 3)))
    assert megatrain("resume", run, "ema_decay=null", "max_steps=4", *more) == 2
    assert "resume with --allow ema_decay" in capsys.readouterr().err
    assert megatrain("resume", run, "ema_decay=null", "max_steps=4", *more, "--allow", "ema_decay") == 0
    assert "the average of the weights, which step 3 has, is kept no longer" in capsys.readouterr().out
    assert averages_of(run, 4) == {}
    assert megatrain("export", run, tmp_path / "old", "--step", "3", "--ema", "--dtype", "fp32") == 0
    assert same(load_file(tmp_path / "old/model.safetensors"), averages_of(run, 3))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_export_writes_the_averaged_model(run_config: Path, tmp_path: Path, precision: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    assert megatrain("train", run_config, KEEP, f"precision={precision}", "freeze=embed_tokens") == 0
    averages, masters = averages_of(run, 6), masters_of(run, 6)
    out.mkdir()
    for word, rounded in (("fp32", lambda t: t), ("bf16", lambda t: split_master(t)[0]), ("fp16", lambda t: t.half())):
        assert megatrain("export", run, out / word, "--ema", "--dtype", word) == 0
        saved = load_file(out / word / "model.safetensors")
        assert same(saved, {name: rounded(averages.get(name, master)) for name, master in masters.items()})
    _, report = AutoModelForCausalLM.from_pretrained(out / "fp32", output_loading_info=True)
    assert not any(report.values())
    assert "fp32, the running average (ema_decay)" in (out / "fp32/README.md").read_text()
    assert megatrain("export", run, out / "last", "--dtype", "fp32") == 0
    assert same(load_file(out / "last/model.safetensors"), masters)
    assert "average" not in (out / "last/README.md").read_text().split("## Settings")[0]


def test_export_refuses_what_it_cannot_write(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config, "max_steps=1") == 0
    for words, said in (
        ((), "step 1 of .* has no average of the weights: it was trained without ema_decay; leave --ema out"),
        (("--format", "dcp"), "--ema writes the averaged weights as a model folder; leave --format dcp out"),
    ):
        capsys.readouterr()
        assert megatrain("export", tmp_path / "run", tmp_path / "out", "--ema", *words) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert re.search(said, error), error
        assert not (tmp_path / "out").exists()


def test_plan_counts_it(run_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*words: str) -> tuple[dict[str, int], int]:
        assert megatrain("plan", run_config, *words, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        return {row["component"]: row["num_bytes"] for row in found["memory"]}, found["num_parameters"]

    (without, count), (kept, _) = planned(), planned(KEEP)
    more = {name: kept[name] - without[name] for name in kept if kept[name] != without[name]}
    state = more.pop("optimizer state")
    (copies,) = more  # and nothing else grows
    padded = state - 4 * count
    assert 0 <= padded < 0.1 * state
    assert copies == "checkpoints (4)"
    assert more[copies] == 4 * state

"""A run whose segments live on disk, as a person starts it: the same model, resumed too, nothing left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.models.spec_of import model_spec
from megatrain.schedule.plan import Plan, SegmentPlan
from tests.cli.test_verbs import bits, megatrain, metrics


def plan_on_disk(model: Path, target: Path) -> Path:
    """A plan file with every state and all weights on disk."""
    spec = model_spec(AutoConfig.from_pretrained(model))
    segments = tuple(SegmentPlan(s.name, s.kind, True, state="disk", weights_home="disk") for s in spec.segments)
    ends = {"weights": "own", "grads": "own"}
    segments = tuple(s if s.kind == "block" else replace(s, **ends) for s in segments)  # type: ignore[arg-type]
    plan = Plan(segments, spec.tied, weight_slots=2, grad_slots=2, round_micro_batches=2, disk_slots=2)
    target.write_text(json.dumps(asdict(plan)))
    return target


def model_of(config: Path) -> Path:
    words = dict(line.split(": ", 1) for line in config.read_text().splitlines() if ": " in line)
    return Path(words["model"])


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_on_disk_is_the_run_in_ram_and_goes_on_from_its_checkpoint(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_on_disk(model_of(run_config), tmp_path / "plan.json")
    assert megatrain("train", run_config, f"output_dir={tmp_path}/ram") == 0
    assert megatrain("train", run_config, f"output_dir={tmp_path}/disk", "--plan", plan) == 0
    assert same(bits(tmp_path / "ram", 6), bits(tmp_path / "disk", 6))
    assert metrics(tmp_path / "ram") == metrics(tmp_path / "disk")
    rows = [json.loads(line) for line in (tmp_path / "disk" / "metrics.jsonl").read_text().splitlines()]
    lanes = [row["lanes"] for row in rows if "lanes" in row]
    assert any(busy["disk"] > 0 and busy["disk_read"] > 0 for busy in lanes)
    names = {path.name for path in (tmp_path / "disk").iterdir()}
    assert names == {path.name for path in (tmp_path / "ram").iterdir()}, "no scratch file is left"
    shutil.rmtree(tmp_path / "disk" / "checkpoints" / "step-6")
    capsys.readouterr()
    assert megatrain("train", run_config, f"output_dir={tmp_path}/disk", "--plan", plan) == 0
    assert "going on after step 4" in capsys.readouterr().out
    assert same(bits(tmp_path / "ram", 6), bits(tmp_path / "disk", 6))


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_on_disk_and_goes_on_with_the_same_bits(run_config: Path, tmp_path: Path) -> None:
    plan = plan_on_disk(model_of(run_config), tmp_path / "plan.json")
    assert megatrain("train", run_config, f"output_dir={tmp_path}/ram") == 0
    folder = tmp_path / "killed"
    words = ["train", str(run_config), f"output_dir={folder}", "--plan", str(plan)]
    started = subprocess.Popen([sys.executable, "-m", "megatrain", *words], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert any("saved step 2" in line for line in started.stdout), "ends before its second step"
    started.kill()
    started.wait()
    started.stdout.close()
    assert not [path for path in folder.rglob("*") if "scratch" in path.name]
    assert megatrain(*words) == 0
    assert same(bits(tmp_path / "ram", 6), bits(folder, 6))


def deeper(model: Path, target: Path) -> Path:
    """A model of the same tokenizer whose states are larger than three landing slots."""
    shutil.copytree(model, target)
    config = AutoConfig.from_pretrained(model)
    wide = {"num_hidden_layers": 12, "hidden_size": 128, "intermediate_size": 512}
    for key, value in wide.items():
        setattr(config, key, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    return target


def test_where_ram_is_short_the_planner_puts_on_disk_what_a_run_and_an_export_need(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = deeper(model_of(run_config), tmp_path / "deep")
    words = (f"model={model}", "max_steps=2", "save_steps=1", "activations=recompute", "eval_dataset=", "eval_steps=")
    assert megatrain("plan", run_config, *words, "--json") == 0
    roomy = json.loads(capsys.readouterr().out)
    assert {segment["state"] for segment in roomy["plan"]["segments"]} == {"ram"}
    ram = f"memory.ram={int((roomy['totals']['ram'] - (12 << 20)) / 0.95)}B"
    for folder, budget in (("ram", ()), ("disk", (ram,))):
        assert megatrain("train", run_config, *words, *budget, f"output_dir={tmp_path}/{folder}") == 0
        assert megatrain("export", tmp_path / folder, tmp_path / f"{folder}-out", "--dtype", "fp32") == 0
    placed = json.loads((tmp_path / "disk" / "plan.json").read_text())
    assert "disk" in {segment["state"] for segment in placed["plan"]["segments"]}
    assert same(bits(tmp_path / "ram", 2), bits(tmp_path / "disk", 2))
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ram-out" / name).read_bytes() == (tmp_path / "disk-out" / name).read_bytes()


def test_a_run_that_would_wear_the_drive_beyond_its_allowance_does_not_start(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_on_disk(model_of(run_config), tmp_path / "plan.json")
    words = ("train", run_config, f"output_dir={tmp_path}/worn", "--plan", plan)
    assert megatrain(*words, "memory.disk_max_written=1MiB") == 2
    error = capsys.readouterr().err
    assert "the run would write" in error
    assert "(6 steps of 352 KB, the rest is loading and checkpoints), memory.disk_max_written is 1.05 MB" in error
    assert not (tmp_path / "worn" / "metrics.jsonl").exists()
    assert megatrain("plan", *words[1:], "max_steps=6", "memory.disk_max_written=1MiB") == 1
    assert f"megatrain: {capsys.readouterr().out.splitlines()[-1]}\n" == error, "plan and train say the same"
    assert megatrain("plan", run_config, "--plan", plan, "max_steps=6", "memory.disk_tbw=1GB") in (0, 1)
    shown = capsys.readouterr().out
    assert "TB a day (" in shown
    assert "of the drive's 1 GB)" in shown
    assert megatrain(*words, "memory.disk_max_written=1GiB") == 0

"""Options people expect of a trainer, through the command line, on a tiny model."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.cli import assemble, training
from megatrain.cli.assemble import planned, template_of
from megatrain.cli.main import main
from megatrain.cli.training import work_of
from megatrain.config import RunConfig, read_config
from megatrain.config_values import Memory
from megatrain.engine.trace import Trace
from megatrain.hardware.described import read_machine
from tests.conftest import write_rows
from tests.families import tiny_config


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def steps(run: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def figures(run: Path) -> list[tuple[object, ...]]:
    return [(row["loss"], row["grad_norm"], row["lr"], row["tokens"]) for row in steps(run)]


def holds(key: str, kind: type) -> bool:
    annotation = RunConfig.model_fields[key].annotation
    return kind in (annotation, *get_args(annotation))


# The largest that a config may say, of every key that holds a number.
LARGEST = {key: "9" * 18 for key in RunConfig.model_fields if holds(key, int)}
LARGEST |= {key: "1e308" for key in RunConfig.model_fields if holds(key, float)}
LARGEST |= {f"memory.{key}": "9" * 400 + "TiB" for key in Memory.model_fields}
# Of these a run may have as many as it likes: none of them is a number of things to make.
HARMLESS = {"seed", "warmup_steps", "early_stopping_patience", "early_stopping_threshold", "loss_chunk_tokens",
            "round_micro_batches", "logging_steps", "eval_steps", "save_steps"}  # fmt: skip


def test_no_number_is_so_large_that_a_run_breaks(run_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence and exit code 2 (an OverflowError before, or a thread for each), or a run like any other."""
    for key in LARGEST.keys() - HARMLESS - {"max_steps"}:
        words = () if key == "num_train_epochs" else ("max_steps=1",)
        assert megatrain("train", run_config, *words, f"{key}={LARGEST[key]}") == 2, key
        assert capsys.readouterr().err.startswith("megatrain: "), key
    assert megatrain("train", run_config, "max_steps=1", *(f"{key}={LARGEST[key]}" for key in HARMLESS)) == 0


def test_the_trace_of_a_step_is_written_when_its_time_is_taken(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some thousand ops, a line each, are no part of the step, nor of the next."""
    write = Trace.write

    def slow(trace: Trace, path: Path) -> None:
        time.sleep(30.0)
        write(trace, path)

    waited_s: list[float] = []
    monkeypatch.setattr(time, "sleep", waited_s.append)
    passed_s = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: passed_s() + sum(waited_s))
    monkeypatch.setattr(Trace, "write", slow)
    assert megatrain("train", run_config, "max_steps=5", "eval_steps=5", "save_steps=5") == 0
    assert (tmp_path / "run/trace.jsonl").stat().st_size > 0
    assert 30.0 in waited_s
    assert max(float(str(row["step_s"])) for row in steps(tmp_path / "run")) < 30.0


def without_batch(run_config: Path) -> Path:
    text = run_config.read_text().replace("train_batch_size: 3\n", "")
    run_config.write_text(text.replace("output_dir:", "# output_dir:").replace("eval_dataset:", "# eval_dataset:"))
    return run_config


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_accumulation_8_is_batch_8_transformers_34191(run_config: Path, tmp_path: Path, schedule: str) -> None:
    """Also: LR jumps with accumulation (transformers 27749)."""
    words = ("max_steps=3", f"lr_scheduler_type={schedule}", "warmup_steps=1", "save_strategy=no")
    old = ("per_device_train_batch_size=1", "gradient_accumulation_steps=8")
    config = without_batch(run_config)
    assert megatrain("train", config, *words, *old, f"output_dir={tmp_path}/old") == 0
    assert megatrain("train", config, *words, "train_batch_size=8", f"output_dir={tmp_path}/new") == 0
    assert figures(tmp_path / "old") == figures(tmp_path / "new")
    rates = [row["lr"] for row in steps(tmp_path / "old")]
    assert rates[0] == 0.0
    assert rates[1] > rates[2] > 0.0


def test_several_epochs_and_max_steps(run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = without_batch(run_config)
    text = config.read_text().replace("max_steps: 6\n", "")
    config.write_text(text)
    words = ("train_batch_size=8", "save_strategy=no", "packing=false")
    assert megatrain("train", config, *words, "num_train_epochs=1.5", f"output_dir={tmp_path}/a") == 0
    assert "steps: 8 of 8 rows; an epoch is 5 (40 rows), the run 1.60 epochs" in capsys.readouterr().out
    assert len(steps(tmp_path / "a")) == 8
    assert megatrain("train", config, *words, "max_steps=2", f"output_dir={tmp_path}/b") == 0
    assert len(steps(tmp_path / "b")) == 2


def test_several_datasets_are_mixed_and_accounted_for(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path / "more.jsonl", 10, first=100)
    (tmp_path / "text.jsonl").write_text('{"text": "the cat sat on a mat"}\n' * 6 + "not json\n")
    text = "".join(line for line in run_config.read_text().splitlines(keepends=True) if not line.startswith("dataset:"))
    run_config.write_text(
        f"{text}packing: false\ndataset:\n  - {tmp_path}/train.jsonl\n"
        f"  - {{path: {tmp_path}/more.jsonl, repeat: 2}}\n  - {{path: {tmp_path}/text.jsonl, format: text}}\n"
    )
    assert megatrain("train", run_config, "max_steps=4") == 0
    shown = capsys.readouterr().out
    assert f"data: {tmp_path}/train.jsonl: messages, 40 rows read, 40 used" in shown
    assert "trained; 20 rows of an epoch" in shown
    assert f"data: {tmp_path}/text.jsonl: text, 7 rows read, 6 used" in shown
    assert "  left out: 1 rows: not JSON" in shown
    assert "an epoch is 22 (66 rows)" in shown
    run = tmp_path / "run"
    assert megatrain("resume", run, "max_steps=6", "--allow", "max_steps") == 0
    run.rename(tmp_path / "resumed")
    assert megatrain("train", run_config, "max_steps=6") == 0
    assert [row["tokens"] for row in steps(run)] == [row["tokens"] for row in steps(tmp_path / "resumed")]
    capsys.readouterr()
    assert megatrain("data", "preview", run_config) == 0
    shown = capsys.readouterr().out
    assert shown.count("rows read") == 3
    assert "format text: 7 rows read, 6 used" in shown


def test_a_dataset_that_is_not_there_is_named(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"dataset=[{tmp_path}/train.jsonl, identity]"
    assert megatrain("train", run_config, words) == 2
    assert "dataset identity does not exist" in capsys.readouterr().err


def test_frozen_parameters_do_not_move(run_config: Path, tmp_path: Path) -> None:
    assert megatrain("train", run_config, "max_steps=2", "freeze=embed_tokens") == 0
    state = tmp_path / "run/checkpoints/step-2/state"
    assert not (state / "EMBED.safetensors").exists()
    assert (state / "L000.safetensors").exists()


def test_loss_on_chosen_roles_and_smoothing(run_config: Path, tmp_path: Path) -> None:
    words = ("max_steps=1", "save_strategy=no", "packing=false")
    runs = {"plain": (), "user": ("train_roles=user",), "both": ("train_roles=[user, assistant]",),
            "smooth": ("label_smoothing_factor=0.1",)}  # fmt: skip
    for name, more in runs.items():
        assert megatrain("train", run_config, *words, *more, f"output_dir={tmp_path}/{name}") == 0
    counts = {name: int(str(steps(tmp_path / name)[0]["supervised_tokens"])) for name in runs}
    assert counts["both"] == counts["plain"] + counts["user"]
    assert counts["smooth"] == counts["plain"]
    assert figures(tmp_path / "smooth") != figures(tmp_path / "plain")


def test_noise_on_embeddings_is_that_of_the_step_after_a_resume(run_config: Path, tmp_path: Path) -> None:
    words = ("neftune_noise_alpha=5", "lr_scheduler_type=constant")
    assert megatrain("train", run_config, *words, "max_steps=4", f"output_dir={tmp_path}/whole") == 0
    assert megatrain("train", run_config, *words, "max_steps=2") == 0
    assert megatrain("resume", tmp_path / "run", "max_steps=4", "--allow", "max_steps") == 0
    assert figures(tmp_path / "run") == figures(tmp_path / "whole")
    assert megatrain("train", run_config, *words[1:], "max_steps=4", f"output_dir={tmp_path}/quiet") == 0
    assert figures(tmp_path / "quiet") != figures(tmp_path / "whole")


@pytest.mark.parametrize(
    "words",
    [
        ("lr_scheduler_type=warmup_stable_decay", "warmup_ratio=0.9", "decay_ratio=0.5"),
        ("neftune_noise_alpha=0",),
        ("ema_decay=1",),
        ("report_to=mlflow",),
    ],
)
def test_wishes_that_cannot_be_honoured_are_one_sentence(
    run_config: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert megatrain("train", run_config, *words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_the_weight_of_the_balancing_loss_is_a_key(
    run_config: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mixtral"
    shutil.copytree(tiny_model, folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config("mixtral", vocab_size=320)).save_pretrained(folder)
    own = json.loads((folder / "config.json").read_text())

    def weight(coefficient: float | None, **members: object) -> float | None:
        (folder / "config.json").write_text(json.dumps({**own, **members}))
        words = [] if coefficient is None else [f"router_aux_loss_coef={coefficient}"]
        balance = template_of(planned(read_config(run_config, [f"model={folder}", *words]))).balance
        return None if balance is None else balance.coefficient

    asking = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    for coefficient, silent, asked in ((None, None, 0.25), (0.5, 0.5, 0.5), (0, None, None)):
        assert (weight(coefficient), weight(coefficient, **asking)) == (silent, asked)
    (folder / "config.json").write_text(json.dumps(own))
    words = (f"model={folder}", "max_steps=1", "eval_steps=null", "eval_dataset=")
    losses = []
    for name, more in (("with", ["moe_aux_loss_coef=0.5"]), ("without", [])):
        assert megatrain("train", run_config, *words, *more, f"output_dir={tmp_path}/{name}") == 0
        losses.append(json.loads((tmp_path / name / "metrics.jsonl").read_text())["loss"])
        saved = json.loads((tmp_path / name / "checkpoints/step-1/model/config.json").read_text())
        assert saved.get("output_router_logits") == own.get("output_router_logits"), "of the model, not of the run"
    assert losses[0] > losses[1] + 0.4
    capsys.readouterr()
    assert megatrain("train", run_config, "router_aux_loss_coef=0.01") == 2
    assert "router_aux_loss_coef is 0.01, but LlamaForCausalLM has no routers" in capsys.readouterr().err
    assert megatrain("plan", run_config, "router_aux_loss_coef=0") == 0


def test_seconds_are_promised_before_and_held_against_what_was_measured(run_config: Path, tmp_path: Path) -> None:
    assert megatrain("train", run_config) == 0
    lines = (tmp_path / "run/log.txt").read_text().splitlines()
    said = (
        r"predicted: (\d+\.\d{3}) s/step, [\d,]+ tok/s, (\d+) steps in \d:\d\d:\d\d; compiling, .* \(rates: assumed; .*"
    )
    (promise,) = [match for match in map(re.compile(said).fullmatch, lines) if match]
    assert promise[2] == "6"
    first = next(index for index, line in enumerate(lines) if line.startswith(("step ", "saved step")))
    assert lines.index(promise[0]) < first
    said = r"measured: (\d+\.\d{3}) s/step \(median\), \d+\.\d\d times the predicted (\d+\.\d{3}) s"
    (kept,) = [match for match in map(re.compile(said).fullmatch, lines) if match]
    assert kept[2] == promise[1]
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    steps_s = [row["step_s"] for row in rows if "step_s" in row]
    assert float(kept[1]) == pytest.approx(statistics.median(steps_s[2:]), abs=1e-3)


def test_a_plan_without_checkpoints_has_none(run_config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("plan", run_config) == 0
    assert "checkpoints (" in capsys.readouterr().out
    assert megatrain("plan", run_config, "save_strategy=no") == 0
    shown = capsys.readouterr().out
    assert "checkpoints (" not in shown
    assert "checkpoint writer" not in shown
    assert "checkpoint: none (save_strategy: no); the model is written at the end" in shown


def test_the_work_of_two_passes_is_counted_with_both(run_config: Path) -> None:
    for mode, backwards in (("deferred", 1), ("two-pass", 2)):
        run = planned(read_config(run_config, [f"clip_mode={mode}", "train_batch_size=1"]))
        assert work_of(run).plan.backwards == backwards


def test_bits_are_held_before_the_first_product_on_a_gpu(run_config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS reads its setting once, and the peak is measured before the model is made."""
    done: list[object] = []
    monkeypatch.setattr(assemble, "repeat_bits", done.append)
    monkeypatch.setattr(training, "matmul_flops_per_s", lambda *_: done.append("product") or 1e15)
    described = read_machine("h200-125gb")
    monkeypatch.setattr(assemble, "_here", lambda _: (described.machine, described.rates))
    for deterministic in (True, False):
        words = ["device=auto", f"deterministic={json.dumps(deterministic)}"]
        work_of(planned(read_config(run_config, words)))
        assert done == [deterministic, "product"]
        done.clear()
    planned(read_config(run_config, words), described=described)
    assert not done, "nothing runs here on a machine that is only planned for"

"""What newcomers do in their first hour, and what they are told: mistakes are answered at once, with what to do."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.cli import assemble
from tests.cli.test_door import SHORT, Captured, megatrain, sentence


def test_a_log_a_hidden_folder_and_those_of_a_run_are_no_strangers(run_config: Path, tmp_path: Path) -> None:
    for name in (".cache", "lost+found", "report"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "run/slurm.out").write_text("x")
    assert megatrain("train", run_config, *SHORT) == 0


def test_no_room_for_the_model_at_the_end_is_seen_at_the_start(
    run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    real = assemble.probe
    monkeypatch.setattr(assemble, "probe", lambda *given: replace(real(*given), disk_free_bytes=16 << 20))
    assert megatrain("train", run_config, *SHORT, "save_strategy=no") == 2
    error = sentence(capsys)
    assert "the model at the end of the run takes" in error
    assert "16.00 MiB are free; free disk space, or choose an output_dir on another disk" in error
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(assemble, "probe", lambda *given: replace(real(*given), disk_free_bytes=32 << 20))
    assert megatrain("train", run_config, *SHORT, "save_strategy=no") == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--learning_rate=1e-4",), "learning_rate=1e-4"),
        (("--output-dir", "x"), "output_dir=…"),
        (("--lr", "1e-4"), "learning_rate=…"),
    ],
)
def test_a_key_written_as_an_option_is_told_how_keys_are_written(
    run_config: Path, capsys: Captured, words: tuple[str, ...], said: str
) -> None:
    for verb in (("train",), ("plan",), ("data", "preview")):
        assert megatrain(*verb, run_config, *words) == 2
        assert f"is no option; keys are given as KEY=VALUE, without dashes: {said}\n" in sentence(capsys)
    assert megatrain("train", run_config, "--no-such-thing") == 2
    assert "No such option" in capsys.readouterr().err


WITHOUT_TORCH = """
import contextlib, io, json, sys
from megatrain.cli.main import main
told = {}
for line in json.load(sys.stdin):
    sys.argv, error = ["megatrain", *line.split()], io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as ended:
            told[line] = ended.code, error.getvalue(), bool(sys.modules.keys() & {"torch", "transformers"})
print(json.dumps(told))
"""


def test_a_mistake_is_answered_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model: m\ndataset: d\nlerning_rate: 1\n")
    (tmp_path / "my.yaml").write_text("model: m\ndataset: d\noutput_dir: left\n")
    (tmp_path / "lost.yaml").write_text("model: m\ndataset: d\noutput_dir: new\n")
    for folder, text in (("run", "model: m\ndataset: d\n"), ("left/checkpoints/step-3/model", "")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.yaml").write_text(text)
    (tmp_path / "run/checkpoints/step-3").mkdir(parents=True)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/config.yaml").write_text("model: m\ndataset: d\n")
    (tmp_path / "torn/plan.json").write_text("{")
    (tmp_path / "endless.yaml").symlink_to("/dev/zero")
    (tmp_path / "nul.yaml").write_text('model: m\ndataset: d\noutput_dir: "a\\0b"\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy/config.yaml").write_text("model: m\ndataset: d\n")
    (tmp_path / "busy/.lock").write_text("17\n")
    lock = os.open(tmp_path / "busy/.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    cases = {
        "train bad.yaml": "unknown key 'lerning_rate'",
        "train none.yaml": "cannot be read",
        "train my.yaml --allow dta": "did you mean 'data'?",
        "train my.yaml": "has checkpoints but no config.yaml",
        "train lost.yaml": "model 'm' is no folder with a config.json",
        "train lost.yaml model=model": "dataset d does not exist",
        "train lost.yaml model=model dataset=a.jsonl eval_dataset=e": "eval_dataset e does not exist",
        "train lost.yaml output_dir=busy": "busy is in use by another run (process 17)",
        "resume busy": "busy is in use by another run (process 17)",
        "plan lost.yaml": "model 'm' is no folder with a config.json",
        "data preview lost.yaml": "model 'm' is no folder with a config.json",
        "data preview lost.yaml model=model": "dataset d does not exist",
        "eval run --dataset b.jsonl": "eval_dataset b.jsonl does not exist",
        "plan bad.yaml": "unknown key",
        "train endless.yaml": "endless.yaml is longer than 1 MiB; give a YAML file",
        "config show endless.yaml": "is longer than 1 MiB",
        "config import endless.yaml": "is longer than 1 MiB",
        "train nul.yaml": "no name of a file has a NUL character",
        "train lost.yaml eval_dataset=''": "eval_dataset is ''; it may not be empty",
        "train lost.yaml output_dir=''": "output_dir is ''; it may not be empty",
        "init no/folder/my.yaml": "no/folder is no folder; make it first",
        "chat run --prompt a --temperature 1e-9": "1e-09; give 0 for the likeliest word, or 0.0001 or more",
        "plan torn lerning_rate=1": "unknown key",
        "data preview none.yaml": "cannot be read",
        "resume none": "it is not there",
        "resume run lerning_rate=1": "unknown key",
        "resume run output_dir=b": "would change nothing here",
        "resume run --allow dta": "did you mean 'data'?",
        "eval none": "is not there: neither",
        "eval run": "names no eval_dataset",
        "eval run --dataset a.jsonl --step 9": "no checkpoint of step 9; it holds 3",
        "eval run --dataset a.jsonl --step best": "none is best",
        "eval run --dataset a.jsonl --step base": "the run started from m, which is not there",
        "eval model --dataset a.jsonl --step 2": "is a model folder, not a run",
        "eval run max_lenth=9": "unknown key",
        "chat none": "is not there: neither",
        "chat run --step first": "step is 'first'",
        "chat run --step all": "a conversation takes one checkpoint",
        "chat run hello": "command line 'hello': write key=value",
        "chat run learning_rate=1": "would change nothing here",
        "chat run --raw --system s": "so --system has no place",
        "export none out": "is not there: neither",
        "export model out": "is a model folder already",
        "export run model": "is already there",
        "export run out --dtype int4": "dtype is 'int4'",
        "export run out --shard-size 5": "shard-size is '5'",
        "export run out --step 9": "no checkpoint of step 9",
        "export run out --format gguf": "format is 'gguf'",
        "report torn": "torn/plan.json is damaged",
        "report none": "is not there: neither",
        "report model": "is a model folder; a report",
        "report run --prompt a": "the run started from m, which is not there",
    }
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=tmp_path, input=json.dumps([*cases, "report run"]),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    os.close(lock)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told.pop("report run") == [0, "", False], "a report without samples needs none either"
    for line, message in cases.items():
        code, error, with_torch = told[line]
        assert (code, error.count("\n"), with_torch) == (2, 1, False), (line, error)
        assert error.startswith("megatrain: "), error
        assert message in error, line


def test_what_stands_in_a_configs_place_is_named(tiny_model: Path, run_config: Path, capsys: Captured) -> None:
    assert megatrain("train", tiny_model) == 2
    assert f"it is a model's folder: megatrain init my.yaml --model {tiny_model} writes" in sentence(capsys)
    run = run_config.parent / "run"
    run.mkdir()
    (run / "config.yaml").write_text(run_config.read_text())
    assert megatrain("train", run) == 2
    assert f"it is a run's folder, {run}/config.yaml is its config; megatrain resume {run} goes on" in sentence(capsys)


def test_rows_are_no_longer_than_the_model_knows_unless_that_is_asked_for(
    run_config: Path, tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    positions = json.loads((tiny_model / "config.json").read_text())["max_position_embeddings"]
    assert positions < 2048
    text = run_config.read_text().replace("max_length: 64\nmicro_batch_tokens: 64\n", "")
    run_config.write_text(text.replace("train_batch_size: 3", "train_batch_size: 1"))
    assert megatrain("train", run_config, *SHORT) == 0
    assert f"max_length: {positions}\n" in (tmp_path / "run/config.yaml").read_text()
    assert megatrain("plan", tiny_model) == 0
    assert megatrain("plan", tiny_model, "train_file=rows.jsonl") == 0, "a default gives way to any spelling of its key"
    assert megatrain("init", tmp_path / "new.yaml", "--model", tiny_model) == 0
    assert f"\nmax_length: {positions}\n" in (tmp_path / "new.yaml").read_text()
    capsys.readouterr()
    assert megatrain("plan", tiny_model, "max_length=2048") == 2
    assert f"the model knows {positions} positions" in sentence(capsys)


def test_what_is_not_the_right_kind_of_file_is_one_sentence(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    assert megatrain("train", run_config, *SHORT) == 0
    run, report = tmp_path / "run", ("report", tmp_path / "run")
    manifest = run / "checkpoints/step-2/manifest.json"
    cases: dict[tuple[object, ...], str] = {
        ("plan", run_config, "--plot", tmp_path / "no/x.svg"): "cannot be written: its folder is not there",
        ("doctor", run_config): "is a file; give the folder where runs will be written",
        ("export", run, run_config / "x"): "is no folder; make it first",
    }
    capsys.readouterr()
    for words, message in cases.items():
        assert megatrain(*words) == 2
        assert message in sentence(capsys)
    for text, message in (("{}", "it lists no files"), ("[]", "no JSON object"), ("{", "is damaged (Expecting")):
        manifest.write_text(text)
        assert megatrain(*report) == 2
        assert message in sentence(capsys)
    assert megatrain("plan", run) == 0, "a run folder is planned as its config says"
    assert "LlamaForCausalLM" in capsys.readouterr().out
    assert megatrain("plan", "-h") == 0


def test_padding_without_end_is_said(run_config: Path, capsys: Captured) -> None:
    """Rows are of 64 tokens, a step has three."""
    advice = "advice: a step has 192 tokens, micro_batch_tokens is 384"
    assert megatrain("plan", run_config, "micro_batch_tokens=384") == 0
    assert advice in capsys.readouterr().out
    assert megatrain("train", run_config, *SHORT, "micro_batch_tokens=384") == 0
    assert advice in capsys.readouterr().out
    for tokens in (128, 131, 192):
        assert megatrain("plan", run_config, f"micro_batch_tokens={tokens}") == 0
        assert "advice" not in capsys.readouterr().out
    advice = (
        "advice: 2 × 64 tokens (max_length) fit in 191; the other 63 of each micro-batch are empty: "
        "set micro_batch_tokens to 128\n"
    )
    assert megatrain("plan", run_config, "micro_batch_tokens=191") == 0
    assert advice in capsys.readouterr().out
    assert megatrain("plan", run_config, "micro_batch_tokens=191", "packing=false") == 0
    assert "advice" not in capsys.readouterr().out, "rows that are not filled fit as they come"


def test_a_budget_of_more_than_there_is_is_said(tiny_model: Path, capsys: Captured) -> None:
    words = ("plan", tiny_model, "--machine", "24gb-64gb")
    assert megatrain(*words, "memory.hbm=200GiB", "memory.ram=1TiB", "memory.disk=1GiB") == 0
    shown = capsys.readouterr().out
    assert re.findall(r"advice: memory\.(hbm|ram|disk) is (.*), but only .* GiB are free", shown) == [
        ("hbm", "200.00 GiB"),
        ("ram", "1.00 TiB"),
    ]
    assert megatrain(*words, "memory.hbm=2GiB", "memory.ram=3GiB") == 0
    assert "advice" not in capsys.readouterr().out


def test_an_evaluation_of_nothing_is_said(run_config: Path, capsys: Captured) -> None:
    advice = "advice: eval_steps is 3, but nothing is evaluated; set eval_dataset"
    assert megatrain("plan", run_config) == 0
    assert "advice" not in capsys.readouterr().out
    assert megatrain("plan", run_config, "eval_dataset=null") == 0
    assert advice in capsys.readouterr().out


def test_a_folder_of_several_formats_is_warned_of(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mixed").mkdir()
    for name, row in (("a", {"text": "one two three four"}), ("b", {"prompt": "one", "completion": " two"})):
        (tmp_path / f"mixed/{name}.jsonl").write_text(f"{json.dumps(row)}\n" * (9 if name == "b" else 1))
    warning = "warning: 90% of its rows are left out; files of several formats are several datasets"
    for verb in (("data", "preview"), ("train",)):
        assert megatrain(*verb, run_config, f"dataset={tmp_path}/mixed", "max_steps=1", "eval_steps=null") == 0
        assert warning in capsys.readouterr().out
    assert megatrain("data", "preview", run_config) == 0
    assert "warning" not in capsys.readouterr().out


def test_a_preview_shows_control_characters_and_obeys_none(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "one\x1b[31m two\x9b1m\nthree\x07\x7f"}) + "\n")
    assert megatrain("data", "preview", run_config, f"dataset={tmp_path}/bad.jsonl") == 0
    shown = capsys.readouterr().out
    assert "one␛[31m two\ufffd1m\nthree␇␡" in shown
    assert not [character for character in shown if ord(character) < 32 and character not in "\n\t"]


def test_a_preview_breaks_no_line(run_config: Path, tmp_path: Path, capsys: Captured) -> None:
    text = "one two three " * 30
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}) + "\n")
    assert megatrain("data", "preview", run_config, f"dataset={tmp_path}/long.jsonl", "max_length=512") == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) > 400

"""`megatrain eval`: the same figures as training gave, for any checkpoint or folder, and the harness as an extra."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.cli.main import main


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def evaluated(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, object]]:
    """The results of `megatrain eval WORDS --json`."""
    capsys.readouterr()
    assert megatrain("eval", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)["results"]


def recorded(run: Path) -> dict[int, tuple[float, int]]:
    """Step -> (eval loss, tokens) as training wrote them."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: (row["eval_loss"], row["eval_tokens"]) for row in rows if "eval_loss" in row}


def test_every_checkpoint_gives_the_bits_that_training_gave(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config, "save_steps=3") == 0
    run = tmp_path / "run"
    results = evaluated(capsys, run, "--step", "all", "--step", "base")
    assert {r["step"]: (r["loss"], r["tokens"]) for r in results} == recorded(run)
    assert [r["step"] for r in results] == [0, 3, 6]
    assert all(r["perplexity"] == math.exp(r["loss"]) for r in results)
    (latest,) = evaluated(capsys, run)
    assert latest == results[-1]
    (best,) = evaluated(capsys, run, "--step", "best")
    assert best["step"] == min(results[1:], key=lambda r: r["loss"])["step"]
    assert megatrain("eval", run, "--step", "3", "--step", "6") == 0
    shown = capsys.readouterr().out
    assert f"step 6  loss {results[2]['loss']:.4f}" in shown
    assert shown.count("(lowest)") == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_folder_gives_the_loss_of_transformers(
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = "the cat sat on a mat and the dog ran to a log"
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": text}) + "\n")
    words = ("device=cpu", f"precision={precision}", "assistant_only_loss=false")
    (result,) = evaluated(capsys, tiny_model, "--dataset", rows, *words)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32 if precision == "fp32" else torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id]])
    expected = model(input_ids=ids, labels=ids).loss.item()
    assert result["step"] is None
    assert result["tokens"] == ids.numel() - 1
    assert result["loss"] == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)


def test_weights_alone_are_held(run_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatrain.cli import evaluate as verb  # noqa: PLC0415 - torch is imported only when a test runs

    assert megatrain("train", run_config, "max_steps=2") == 0
    held: dict[str, int] = {}
    engine_of = verb.engine_of

    def spy(run: object, store: object) -> object:
        held.update(store.num_bytes()["ram"])
        return engine_of(run, store)

    monkeypatch.setattr(verb, "engine_of", spy)
    assert megatrain("eval", tmp_path / "run") == 0
    assert sorted(held) == ["w"]


def test_mistakes_end_in_one_sentence(
    run_config: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config, "max_steps=2", "eval_dataset=") == 0
    run = tmp_path / "run"
    capsys.readouterr()
    cases = {
        ("eval", run): "names no eval_dataset; give one with --dataset FILE",
        ("eval", run, "--dataset", tmp_path / "eval.jsonl", "--step", "7"): "no checkpoint of step 7; it holds 2",
        ("eval", run, "--dataset", tmp_path / "eval.jsonl", "--step", "first"): "step is 'first'",
        ("eval", run, "--dataset", tmp_path / "eval.jsonl", "--step", "best"): "none is best",
        ("eval", tiny_model, "--dataset", tmp_path / "eval.jsonl", "--step", "2"): "is a model folder, not a run",
        ("eval", tmp_path): "is neither a run folder (config.yaml) nor a Hugging Face model folder",
        ("eval", tiny_model, "--dataset", tmp_path / "eval.jsonl", "memory.ram=1MiB"): "the smallest budget",
    }
    for words, said in cases.items():
        assert megatrain(*words) == 2, words
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_damage_is_found_before_it_is_believed(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert megatrain("train", run_config, "max_steps=2") == 0
    shard = next((tmp_path / "run/checkpoints/step-2/model").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(data)
    assert megatrain("eval", tmp_path / "run") == 2
    assert "is damaged in bytes" in capsys.readouterr().err


HARNESS = """
import json, sys
print("harness", json.dumps(sys.argv[1:]))
sys.exit(3 if "broken" in sys.argv else 0)
"""


def test_the_harness_is_an_extra(
    run_config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert megatrain("train", run_config, "max_steps=2") == 0
    run = tmp_path / "run"
    monkeypatch.setattr("megatrain.cli.evaluate.HARNESS", "lm_eval_that_is_not_there")
    assert megatrain("eval", run, "--lm-eval", "arc_easy") == 2
    assert 'lm-eval is not installed; pip install "megatrain[eval]"' in capfd.readouterr().err
    folder = tmp_path / "path/stub_of_harness"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "__main__.py").write_text(HARNESS)
    monkeypatch.setattr("megatrain.cli.evaluate.HARNESS", "stub_of_harness")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    monkeypatch.syspath_prepend(str(folder.parent))
    (tmp_path / "eval.jsonl").unlink()  # the harness brings data of its own
    assert megatrain("eval", run, "--lm-eval", "arc_easy,hellaswag") == 0
    said = next(line for line in capfd.readouterr().out.splitlines() if line.startswith("harness"))
    words = json.loads(said.removeprefix("harness "))
    model = f"pretrained={run}/checkpoints/step-2/model,dtype=float32"
    assert words == ["--model", "hf", "--tasks", "arc_easy,hellaswag", "--model_args", model, "--device", "cpu"]
    assert megatrain("eval", run, "--lm-eval", "broken") == 2
    assert "exit code 3" in capfd.readouterr().err

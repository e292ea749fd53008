"""Complaints about what a run computes, logs and saves, heard of other tools: each cannot happen here.

The names are the public threads: project, number, what people said.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain import optim
from tests.cli.test_verbs import bits, megatrain, metrics
from tests.complaints.conftest import STEPS


def model_of(run: Path) -> Path:
    return run / "checkpoints" / f"step-{STEPS}" / "model"


def dtypes(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - no dict
    return found


def test_transformers_30202_a_tied_head_is_lost_or_doubled(finished: Path, tiny_model: Path) -> None:
    saved = model_of(finished / "run")
    names = list(dtypes(saved))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    model = AutoModelForCausalLM.from_pretrained(saved)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.num_parameters() == AutoModelForCausalLM.from_pretrained(tiny_model).num_parameters()


def test_llamafactory_8399_the_chat_template_is_missing_from_the_save(
    finished: Path, tiny_model: Path, tmp_path: Path
) -> None:
    assert megatrain("export", finished / "run", tmp_path / "out") == 0
    source = AutoTokenizer.from_pretrained(tiny_model)
    for folder in (model_of(finished / "run"), tmp_path / "out"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == source.chat_template
        assert tokenizer.get_vocab() == source.get_vocab()


@pytest.mark.parametrize(("asked", "kept"), [("bf16", "BF16"), ("fp16", "F16"), ("fp32", "F32")])
def test_llamafactory_2847_the_saved_dtype_is_another(finished: Path, tmp_path: Path, asked: str, kept: str) -> None:
    """The files have the type that was asked for, and config.json says the same."""
    assert megatrain("export", finished / "run", tmp_path / "out", "--dtype", asked) == 0
    assert set(dtypes(tmp_path / "out").values()) == {kept}
    config = json.loads((tmp_path / "out/config.json").read_text())
    named = config.get("dtype", config.get("torch_dtype"))
    assert named == {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[asked]


def test_ms_swift_6049_the_loss_differs_after_resume(finished: Path, stopped: Path) -> None:
    assert megatrain("resume", stopped) == 0
    assert metrics(stopped) == metrics(finished / "run")
    one, other = bits(stopped, STEPS), bits(finished / "run", STEPS)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_transformers_27749_the_learning_rate_jumps_with_accumulation(finished: Path, config: Path) -> None:
    """The schedule counts optimizer steps, whether a step is one micro-batch or many."""
    assert megatrain("train", config, "micro_batch_tokens=1024", "save_strategy=no", "eval_steps=100") == 0
    one, many = ([row["lr"] for row in metrics(run)] for run in (config.parent / "run", finished / "run"))
    assert one == many
    assert len(set(one)) == STEPS


def test_transformers_34191_accumulation_is_not_the_batch(finished: Path, config: Path) -> None:
    """Rows of uneven length, one a micro-batch or all in one: the mean is over the tokens of the step."""
    assert megatrain("train", config, "micro_batch_tokens=1024", "save_strategy=no", "eval_steps=100") == 0
    one, many = metrics(config.parent / "run"), metrics(finished / "run")
    for left, right in zip(one, many, strict=True):
        assert left["supervised_tokens"] == right["supervised_tokens"]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-4)


def test_nemo_automodel_3444_weights_never_move_in_bf16() -> None:
    """Updates of a thousandth of what a bf16 weight can show: it moves all the same, by way of its other half."""
    hi, lo = optim.split(np.ones(512, np.float32))
    m, v, g = np.zeros(512, np.float32), np.zeros(512, np.float32), np.ones(512, np.float32)
    hyper = optim.AdamW(4e-6, 0.9, 0.95, 1e-8, 0.0)
    before = hi.copy()
    for step in range(1, 1001):
        optim.update_split(hi, lo, m, v, g, optim.scalars(hyper, step, 1.0), decay=False, threads=1)
        assert step > 1 or (hi == before).all()
    np.testing.assert_allclose(optim.join(hi, lo), 1 - 1000 * 4e-6, rtol=1e-5)
    assert (hi != before).all()


def test_trl_6702_nan_is_filtered_from_the_log(config: Path) -> None:
    words = ("learning_rate=1e30", "lr_scheduler_type=constant", "on_nan=skip", "save_strategy=no", "eval_steps=100")
    assert megatrain("train", config, *words) in (0, 2)
    rows = [json.loads(line) for line in (config.parent / "run/metrics.jsonl").read_text().splitlines()]
    norms = {row["step"]: row["grad_norm"] for row in rows if "loss" in row}
    assert sorted(norms) == list(range(1, STEPS + 1))
    assert [step for step, norm in norms.items() if norm == "nan"] == [2, 3, 4]


@pytest.mark.parametrize(
    ("word", "meant"), [("lerning_rate=1e-4", "learning_rate"), ("assistant_only_los=true", "assistant_only_loss")]
)
def test_unsloth_10452_an_unknown_key_is_ignored(
    config: Path, capsys: pytest.CaptureFixture[str], word: str, meant: str
) -> None:
    assert megatrain("train", config, word) == 2
    assert f"{meant}" in capsys.readouterr().err
    key, value = word.split("=")
    config.write_text(config.read_text() + f"{key}: {value}\n")
    assert megatrain("train", config) == 2
    error = capsys.readouterr().err
    assert key in error
    assert meant in error
    assert not (config.parent / "run").exists()

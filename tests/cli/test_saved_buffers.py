"""A router's score correction is in no segment: a run takes it from the model's folder and hands it on untouched."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatrain.cli.main import main
from tests.families import tiny_config

NAME = "model.layers.1.mlp.gate.e_score_correction_bias"


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def corrections(folder: Path) -> torch.Tensor:
    (value,) = (f[NAME] for f in map(load_file, folder.glob("*.safetensors")) if NAME in f)
    return value


def test_a_run_uses_saves_and_exports_them(run_config: Path, tiny_model: Path, tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3", vocab_size=320, bos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    base = tmp_path / "base"
    model.save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, base / name)
    losses = []
    for run, scale in (("plain", 0.0), ("corrected", 1.0)):
        wanted = scale * torch.linspace(-1.0, 1.0, 8)
        model.get_buffer(NAME).copy_(wanted)
        model.save_pretrained(base)
        target = tmp_path / run
        words = [f"model={base}", f"output_dir={target}", "max_steps=2", "save_steps=1", "eval_steps=2"]
        assert megatrain("train", run_config, *words) == 0
        for folder in (target / "checkpoints/step-1/model", target / "checkpoints/step-2/model"):
            assert torch.equal(corrections(folder), wanted), folder
            reopened = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            assert torch.equal(reopened.get_buffer(NAME), wanted)
        rows = [json.loads(line) for line in (target / "metrics.jsonl").read_text("utf-8").splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] != losses[1], "other corrections choose other experts"

"""A whole run with router noise and a router loss in its model's config: stopped and resumed, it has the same bits."""

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


def train(*words: object) -> None:
    """`megatrain train WORDS`, which must end well."""
    sys.argv = ["megatrain", "train", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def saved(run: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted((run / f"checkpoints/step-{step}/model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.slow
def test_resumed_run_is_the_unbroken_one(run_config: Path, tiny_model: Path, tmp_path: Path) -> None:
    noise = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "router_jitter_noise": 0.1}
    runs = {}
    for kind, changes in (("plain", {}), ("noisy", noise)):
        config = tiny_config("mixtral", vocab_size=320, bos_token_id=None, **changes)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / kind)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tiny_model / name, tmp_path / kind / name)
        runs[kind] = tmp_path / f"{kind}-run"
        settings = (run_config, f"model={tmp_path / kind}", "save_steps=1", "learning_rate=1e-3")
        train(*settings, f"output_dir={runs[kind]}", "max_steps=3")
    broken = tmp_path / "broken"
    train(*settings, f"output_dir={broken}", "max_steps=1")
    train(*settings, f"output_dir={broken}", "max_steps=3", "--allow", "max_steps")
    assert losses(broken) == losses(runs["noisy"])
    assert all(torch.equal(tensor, saved(broken, 3)[name]) for name, tensor in saved(runs["noisy"], 3).items())
    assert losses(runs["plain"]) != losses(runs["noisy"])

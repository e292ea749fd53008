"""`megatrain train CONFIG` is the plain loop with what the config says: every key reaches the numbers, unswapped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer

from megatrain.data import BatchPlan, DataOptions, prepare
from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from tests import reference
from tests.cli.test_verbs import megatrain

STEPS, PEAK, CHUNK = 6, 2e-2, 24
NUMBERS = {  # none is a default, no two are alike
    "adam_beta1": 0.8, "adam_beta2": 0.93, "adam_epsilon": 1e-5, "weight_decay": 0.3, "max_grad_norm": 0.7,
}  # fmt: skip
CONFIG = {
    **NUMBERS, "learning_rate": PEAK, "lr_scheduler_type": "linear", "warmup_steps": 2, "seed": 3,
    "loss_chunk_tokens": CHUNK, "max_steps": STEPS, "train_batch_size": 5, "label_smoothing_factor": 0.1,
}  # fmt: skip


def hyper(step: int) -> AdamW:
    """Linear warm-up over two steps, then linearly to zero; written out. `step` counts from 0."""
    rate = PEAK * [0.0, 0.5, 1.0, 0.75, 0.5, 0.25][step]
    return AdamW(rate, NUMBERS["adam_beta1"], NUMBERS["adam_beta2"], NUMBERS["adam_epsilon"], NUMBERS["weight_decay"])


def batches(run_config: Path, model: Path, cache: Path) -> list[list[TokenBatch]]:
    """What the config's data is, prepared anew."""
    options = DataOptions(paths=(run_config.parent / "train.jsonl",), max_length=64, cache_dir=cache)
    plan = BatchPlan(
        prepare(options, AutoTokenizer.from_pretrained(model)), max_length=64, packing=True, train_batch_size=5,
        micro_batch_tokens=64, seed=3, max_steps=STEPS,
    )  # fmt: skip
    return [
        [
            TokenBatch(*map(torch.from_numpy, (m.input_ids_T, m.position_ids_T, m.document_ids_T, m.labels_T)))
            for m in plan.step(index).micro_batches
        ]
        for index in range(STEPS)
    ]


def test_a_run_is_the_plain_loop_with_the_numbers_of_its_config(
    run_config: Path, tiny_model: Path, tmp_path: Path
) -> None:
    assert megatrain("train", run_config, *(f"{key}={value}" for key, value in CONFIG.items())) == 0
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = AutoConfig.from_pretrained(tiny_model)
    weights = load_file(tiny_model / "model.safetensors")
    names = [tensor.name for segment in model_spec(config).segments for tensor in segment.tensors]
    steps = batches(run_config, tiny_model, tmp_path / "other-cache")
    assert max(map(len, steps)) > 1
    want = reference.train(
        config, {name: weights[name].astype(np.float32) for name in names}, steps, list(map(hyper, range(STEPS))),
        precision="fp32", max_grad_norm=NUMBERS["max_grad_norm"], chunk_tokens=CHUNK, label_smoothing=0.1,
    )  # fmt: skip
    assert [row["loss"] for row in rows if "loss" in row] == want.losses
    assert [row["grad_norm"] for row in rows if "loss" in row] == want.grad_norms
    assert max(want.grad_norms) > NUMBERS["max_grad_norm"], "clipping must be at work"
    saved: dict[str, np.ndarray] = {}
    for path in (run / f"checkpoints/step-{STEPS}/model").glob("*.safetensors"):
        saved |= load_file(path)
    assert [name for name in names if saved[name].tobytes() != want.state[name][0].tobytes()] == []


@pytest.mark.parametrize(("step", "rate"), [(0, 0.0), (1, 1e-2), (2, 2e-2), (5, 5e-3)])
def test_the_written_out_rates(step: int, rate: float) -> None:
    assert hyper(step).learning_rate == pytest.approx(rate)

"""The demo's real model on real conversations: twenty clipped steps by the engine and by the plain loop, same bytes.

Slow: about ten minutes on two cores. Fetches and converts the demo's model if `make demo` has not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from demo.prepare import prepare as prepare_demo
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer

from megatrain.data import BatchPlan, DataOptions, prepare
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from megatrain.train.loop import token_batches
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes

ROOT = Path(__file__).parents[2]
TOKENS, STEPS = 128, 20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_steps_equal_the_plain_loop(tmp_path: Path):
    prepare_demo(ROOT / ".demo")
    folder = ROOT / ".demo" / "smollm2-135m"
    config = AutoConfig.from_pretrained(folder)
    options = DataOptions(paths=(ROOT / ".demo" / "train.jsonl",), max_length=TOKENS, cache_dir=tmp_path)
    dataset = prepare(options, AutoTokenizer.from_pretrained(folder))
    plan = BatchPlan(
        dataset, max_length=TOKENS, packing=True, train_batch_size=2, micro_batch_tokens=TOKENS, seed=0, max_steps=STEPS
    )
    steps = [token_batches(plan.step(i).micro_batches) for i in range(STEPS)]
    hypers = [AdamW(3e-5 * (1 - i / STEPS), 0.9, 0.95, 1e-8, 0.1) for i in range(STEPS)]
    names = {tensor.name for segment in model_spec(config).segments for tensor in segment.tensors}
    masters = {name: value.astype(np.float32) for name, value in load_file(folder / "model.safetensors").items()}
    masters = {name: masters[name] for name in names}
    run = Streamed(config, masters, TOKENS, precision="fp32", placement=Placement(threads=2))
    results = run.train(steps, hypers)
    state = run.state()
    run.close()
    want = reference.train(
        config, masters, steps, hypers, precision="fp32", max_grad_norm=1.0, chunk_tokens=CHUNK_TOKENS,
        attn_implementation="megatrain",
    )  # fmt: skip
    assert [r.loss for r in results] == want.losses
    assert [r.grad_norm for r in results] == want.grad_norms
    assert max(want.grad_norms) > 1.0
    assert same_bytes(state, want.state) == []
    moved = sum(not np.array_equal(state[name][0], masters[name]) for name in names)
    assert moved == len(names), "every tensor is trained"

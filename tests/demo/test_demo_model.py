"""The demo's real model on real conversations: by the engine and by the plain loop, in less memory than its state.

Slow on a CPU: about ten minutes on two cores. Fetches and converts the demo's model if `make demo` has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from demo.prepare import prepare as prepare_demo
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from bench.timing import empty_cache
from megatrain.data import BatchPlan, DataOptions, prepare
from megatrain.memory import cap_device_memory
from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from megatrain.train.loop import token_batches
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes

State = dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]  # name -> master, m, v
ROOT = Path(__file__).parents[2]
GPU_TOKENS = 256  # of a micro-batch where memory is short
PLACEMENTS = {  # the embedding's state alone, 283 MB, would not fit beside CUDA's 0.83 GB below
    "two slots": Placement(threads=8, round_micro_batches=4),
    "three slots": Placement(threads=8, round_micro_batches=4, weight_slots=3, grad_slots=3),
    "two rounds": Placement(threads=8, round_micro_batches=2),
    "state streamed": Placement(threads=8, round_micro_batches=4, streamed=frozenset({"L007"})),
    "at home": Placement(threads=8, resident=frozenset({"L029"}), round_micro_batches=2),
}


def demo_model(
    tmp_path: Path, tokens: int, rows: int, num_steps: int
) -> tuple[PreTrainedConfig, Mapping[str, np.ndarray], list[list[TokenBatch]]]:
    """Config, masters and packed steps of `rows` micro-batches of `tokens`."""
    prepare_demo(ROOT / ".demo")
    folder = ROOT / ".demo" / "smollm2-135m"
    config = AutoConfig.from_pretrained(folder)
    options = DataOptions(paths=(ROOT / ".demo" / "train.jsonl",), max_length=tokens, cache_dir=tmp_path)
    dataset = prepare(options, AutoTokenizer.from_pretrained(folder))
    plan = BatchPlan(
        dataset, max_length=tokens, packing=True, train_batch_size=rows, micro_batch_tokens=tokens, seed=0,
        max_steps=num_steps,
    )  # fmt: skip
    steps = [token_batches(plan.step(i).micro_batches) for i in range(num_steps)]
    masters = {name: value.astype(np.float32) for name, value in load_file(folder / "model.safetensors").items()}
    names = {tensor.name for segment in model_spec(config).segments for tensor in segment.tensors}
    return config, {name: masters[name] for name in names}, steps


def schedule(num_steps: int) -> list[AdamW]:
    """Hyper-parameters of each step: the learning rate falls in a line."""
    return [AdamW(3e-5 * (1 - i / num_steps), 0.9, 0.95, 1e-8, 0.1) for i in range(num_steps)]


def trained_on_gpu(
    config: PreTrainedConfig,
    masters: Mapping[str, np.ndarray],
    steps: list[list[TokenBatch]],
    placement: Placement,
) -> tuple[list[float], State]:
    """Losses of every step, and the state behind the last."""
    run = Streamed(config, masters, GPU_TOKENS, precision="bf16", placement=placement, device="cuda")
    try:
        return [result.loss for result in run.train(steps, schedule(len(steps)))], run.state()
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_steps_equal_the_plain_loop(tmp_path: Path):
    config, masters, steps = demo_model(tmp_path, tokens=128, rows=2, num_steps=20)
    run = Streamed(config, masters, 128, precision="fp32", placement=Placement(threads=2))
    results = run.train(steps, schedule(20))
    state = run.state()
    run.close()
    want = reference.train(
        config, masters, steps, schedule(20), precision="fp32", max_grad_norm=1.0, chunk_tokens=CHUNK_TOKENS,
        attn_implementation="megatrain",
    )  # fmt: skip
    assert [r.loss for r in results] == want.losses
    assert [r.grad_norm for r in results] == want.grad_norms
    assert max(want.grad_norms) > 1.0
    assert same_bytes(state, want.state) == []
    moved = sum(not np.array_equal(state[name][0], masters[name]) for name in masters)
    assert moved == len(masters), "every tensor is trained"


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_gpu_smaller_than_the_state_every_placement_gives_the_same_bytes(tmp_path: Path):
    config, masters, steps = demo_model(tmp_path, tokens=GPU_TOKENS, rows=4, num_steps=4)
    state_bytes = 12 * sum(value.size for value in masters.values())
    budget_bytes = int(0.99 * state_bytes)  # of which CUDA itself takes half
    states, losses = {}, {}
    trained_on_gpu(config, masters, steps[:1], PLACEMENTS["two slots"])  # loads CUDA's kernels: the rest is ours
    empty_cache()
    cap_device_memory(budget_bytes, late_modules_bytes=64 << 20)
    try:
        for name, placement in PLACEMENTS.items():
            losses[name], states[name] = trained_on_gpu(config, masters, steps, placement)
            empty_cache()  # one run's slots beside the next one's would not fit
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            assert total_bytes - free_bytes <= budget_bytes, name
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for name, state in states.items():
        assert losses[name] == losses["two slots"], name
        assert same_bytes(state, states["two slots"]) == [], name
    assert any(not np.array_equal(states["two slots"][name][0], masters[name]) for name in masters)

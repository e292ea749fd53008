"""On a GPU: any plan, drawn segment by segment, gives the plain loop's bits and takes no more HBM than its account."""

from __future__ import annotations

import functools
import gc
import random

import numpy as np
import pytest
import torch

from megatrain.config import RunConfig, resolved
from megatrain.hardware.described import read_machine
from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from megatrain.planner import memory_table, question_of, sizes
from megatrain.schedule.plan import Plan
from tests import reference
from tests.engine.random_plans import Following, random_plan, sample
from tests.engine.streamed import CHUNK_TOKENS, same_bytes
from tests.engine.test_random_plans import middling
from tests.families import tiny_batch, tiny_config, tiny_masters

pytestmark = pytest.mark.gpu

TOKENS, ROWS, MIB = 128, 3, 1 << 20
HYPERS = [AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1), AdamW(5e-3, 0.9, 0.95, 1e-8, 0.1)]
ANYHOW, MIXED = 6, 12  # plans of each model: as they come, and with all three tiers and both update engines
H200 = read_machine("h200-125gb")
LENGTH, CHUNK = 256, 64
WORKSPACE_BYTES = 66 * MIB  # of matrix products, taken of torch's pool by the engine: they are in "CUDA libraries"


def on_gpu(batch: TokenBatch) -> TokenBatch:
    return TokenBatch(*(tensor.cuda() for tensor in batch))


@functools.cache
def steps() -> list[list[TokenBatch]]:
    """2 steps of 3 micro-batches in uneven documents."""
    cuts = [(100, 28), (128,), (17, 19, 92)]
    return [[on_gpu(tiny_batch(cut, seed=10 * s + i)) for i, cut in enumerate(cuts)] for s in range(2)]


@functools.cache
def masters_of(family: str) -> dict[str, np.ndarray]:
    return tiny_masters(model_spec(tiny_config(family)))


@functools.cache
def plain(family: str, precision: str) -> reference.Result:
    return reference.train(
        tiny_config(family), masters_of(family), steps(), HYPERS, precision=precision, max_grad_norm=1.0,
        chunk_tokens=CHUNK_TOKENS, attn_implementation="megatrain", device="cuda",
    )  # fmt: skip


@pytest.mark.parametrize("family", ["smollm2", "llama"], ids=["tied", "untied"])
def test_random_plans_give_the_plain_loops_bits(family: str) -> None:
    for seed, precision, plan in sample(model_spec(tiny_config(family)), ROWS, ANYHOW, MIXED):
        want = plain(family, precision)
        run = Following(
            tiny_config(family), masters_of(family), TOKENS, plan, precision=precision, device="cuda", threads=2
        )
        try:
            results = run.train(steps(), HYPERS)
            assert [r.loss for r in results] == want.losses, (seed, plan)
            assert [r.grad_norm for r in results] == want.grad_norms, (seed, plan)
            assert same_bytes(run.state(), want.state) == [], (seed, precision, plan)
        finally:
            run.close()


def planned_bytes(plan: Plan, tied: bool) -> tuple[int, int]:
    """(HBM that the account gives a plan, without CUDA's libraries; of that, homes and slots)."""
    config = RunConfig(
        model="m", dataset="d", max_length=LENGTH, train_batch_size=ROWS, micro_batch_tokens=LENGTH,
        loss_chunk_tokens=CHUNK, save_strategy="no", compile=False,
    )  # fmt: skip
    question = question_of(model_spec(middling(tied)), resolved(config, "cuda", 2), H200.machine, H200.rates)
    table = memory_table(question, plan)
    rows = {row.component: row.num_bytes for row in table.rows if row.tier == "hbm"}
    total = table.total_bytes("hbm") - sizes.CONTEXT_HBM_BYTES
    sometimes = ("working", "kept", "unused", "rotary")
    return total, total - sum(size for name, size in rows.items() if name.startswith(sometimes))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_random_plans_take_no_more_hbm_than_their_account(tied: bool) -> None:
    config = middling(tied)
    masters = tiny_masters(model_spec(config))
    batches = [[on_gpu(tiny_batch((LENGTH,), seed=10 * s + i, vocab_size=6000)) for i in range(ROWS)] for s in range(2)]
    for seed in range(6):
        plan = random_plan(random.Random(seed), model_spec(config), ROWS)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run = Following(config, masters, LENGTH, plan, precision="bf16", chunk_tokens=CHUNK, device="cuda", threads=2)
        try:
            run.train(batches, HYPERS)
            taken = torch.cuda.max_memory_allocated() - before
        finally:
            run.close()
        planned, fixed = planned_bytes(plan, tied)
        said = (
            f"seed {seed}: {taken / MIB:.1f} MiB taken, {planned / MIB:.1f} planned, {fixed / MIB:.1f} from the start"
        )
        print(said)
        assert fixed <= taken <= planned + WORKSPACE_BYTES, said

"""Any plan, drawn segment by segment: the plain loop's bits, a schedule without a race, and no more bytes than planned.

A seed decides everything. To play one again: MEGATRAIN_PLAN_SEEDS=417 pytest tests/engine/test_random_plans.py
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from megatrain.config import RunConfig, resolved
from megatrain.engine.chaos import Chaos
from megatrain.hardware import Machine
from megatrain.hardware.rates import ASSUMED
from megatrain.memory import peak_rss_bytes, reset_peak_rss
from megatrain.models.spec_of import model_spec
from megatrain.planner import memory_table, question_of, sizes
from megatrain.schedule.plan import Plan
from tests.engine.random_plans import Following, mixes_all, random_plan, sample
from tests.engine.replayed import seeds_asked
from tests.engine.streamed import same_bytes
from tests.engine.test_chaos import HYPERS, MODELS, STEPS, TOKENS, plain, setting
from tests.families import tiny_batch, tiny_config, tiny_masters

NUM_FAST, NUM_SLOW, PER_TEST = 10, 240, 40
ASKED = seeds_asked("MEGATRAIN_PLAN_SEEDS")
MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).parents[2]


def played(seed: int) -> tuple[str, str, Plan]:
    """(model, precision, plan) of a seed."""
    dice = random.Random(seed)
    model, precision = dice.choice(list(MODELS)), dice.choice(["fp32", "bf16"])
    family, freeze, _ = MODELS[model]
    spec = model_spec(tiny_config(family), freeze=freeze)
    return model, precision, random_plan(dice, spec, len(setting(model)[1][0]))


def differs(seed: int) -> list[str]:
    """What is other than in the plain loop; empty: nothing."""
    model, precision, plan = played(seed)
    family, freeze, bad_step = MODELS[model]
    masters, steps = setting(model)
    want = plain(model, precision)
    run = Following(
        tiny_config(family), masters, TOKENS, plan, precision=precision, chaos=Chaos(seed, max_delay_s=0.0003),
        threads=1 + seed % 2, freeze=freeze,
    )  # fmt: skip
    try:
        results = run.train(steps, HYPERS)
        same = np.array_equal([r.loss for r in results], want.losses, True)
        same = same and np.array_equal([r.grad_norm for r in results], want.grad_norms, True)
        applied = [r.applied for r in results] == [step != bad_step for step in range(STEPS)]
        return ([] if same and applied else ["losses, norms or applied steps"]) + same_bytes(run.state(), want.state)
    finally:
        run.close()


def play(seeds: range) -> None:
    for seed in seeds:
        found = differs(seed)
        assert not found, f"{found[:5]}\nreplay: MEGATRAIN_PLAN_SEEDS={seed} pytest {__file__}\n{played(seed)}"


@pytest.mark.skipif(not ASKED, reason="plays MEGATRAIN_PLAN_SEEDS again")
def test_replay() -> None:
    play(ASKED)


def test_a_random_plan_gives_the_plain_loops_bits() -> None:
    play(range(NUM_FAST))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(NUM_FAST, NUM_FAST + NUM_SLOW, PER_TEST))
def test_hundreds_of_random_plans_do(first: int) -> None:
    play(range(first, first + PER_TEST))


def test_the_plans_differ_and_hold_every_choice_alone_and_mixed() -> None:
    drawn = [played(seed)[2] for seed in range(2 * NUM_FAST)]
    every = [segment for plan in drawn for segment in plan.segments]
    blocks = [segment for segment in every if segment.kind == "block"]
    assert {segment.state for segment in every} == {"hbm", "ram", "disk"}
    assert {block.activations for block in blocks} == {"recompute", "keep", "offload", "keep_attention"}
    assert {(block.weights, block.grads) for block in blocks} == {
        (w, g) for w in ("own", "pool") for g in ("own", "pool")
    }
    assert any(segment.streams_state for segment in every)
    assert any(segment.weights_on_disk for segment in every)
    assert {plan.clip_mode for plan in drawn} == {"deferred", "two-pass"}
    assert {plan.round_micro_batches for plan in drawn} >= {1, 2, 4}
    assert any(len({block.activations for block in plan.blocks}) > 1 for plan in drawn)
    assert len({plan.segments for plan in drawn}) == 2 * NUM_FAST


def test_a_gpu_plays_twenty_plans_with_all_tiers_and_both_update_engines() -> None:
    specs = [model_spec(tiny_config(family)) for family in ("smollm2", "llama")]
    plans = [plan for spec in specs for _, _, plan in sample(spec, 3, 6, 12)]
    assert len({plan.segments for plan in plans if mixes_all(plan)}) >= 20
    assert {plan.clip_mode for plan in plans} == {"deferred", "two-pass"}
    assert any(segment.streams_state for plan in plans if mixes_all(plan) for segment in plan.segments)


# --- bytes, as measured -------------------------------------------------------------------------------------------
LENGTH, ROWS, CHUNK = 256, 3, 64
CPU = Machine("cpu", "a processor", 0, 0, 64 * GIB, 60 * GIB, 1 << 40, 2, "x86_64 avx2")
SLACK_BYTES = 6 * MIB  # Python's own objects and threads


def middling(tied: bool) -> LlamaConfig:
    """8 to 10M parameters: their bytes are ten times what Python's own may vary by."""
    return LlamaConfig(
        vocab_size=6144, hidden_size=320, intermediate_size=960, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=tied,
    )  # fmt: skip


@functools.cache
def masters_of(tied: bool) -> dict[str, np.ndarray]:
    return tiny_masters(model_spec(middling(tied)))


def planned_bytes(tied: bool, plan: Plan) -> tuple[int, int]:
    """(RAM that the account gives a plan, without the program; of that, homes and slots, taken from the start)."""
    config = RunConfig(
        model="m", dataset="d", max_length=LENGTH, train_batch_size=ROWS, micro_batch_tokens=LENGTH,
        loss_chunk_tokens=CHUNK, save_strategy="no",
    )  # fmt: skip
    question = question_of(model_spec(middling(tied)), resolved(config, "cpu", 2), CPU, ASSUMED["cpu"])
    table = memory_table(question, plan)
    rows = {row.component: row.num_bytes for row in table.rows if row.tier == "ram"}
    # a CPU has one memory: what a plan would keep in HBM is in RAM, and counted there
    working = sum(size for name, size in rows.items() if name.startswith(("working", "kept")))
    program = rows["program and libraries"]
    assert program == sizes.PROGRAM_RAM_BYTES["cpu"]
    return sum(rows.values()) - program, sum(rows.values()) - program - working


def taken_bytes(tied: bool, plan: Plan) -> int:
    """What resident memory grew by, at its peak, over two steps under a plan."""
    masters = masters_of(tied)
    steps = [[tiny_batch((LENGTH,), seed=10 * s + i, vocab_size=6000) for i in range(ROWS)] for s in range(2)]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the run before gave back, to the system
    reset_peak_rss()
    before = peak_rss_bytes()
    run = Following(middling(tied), masters, LENGTH, plan, precision="fp32", chunk_tokens=CHUNK)
    try:
        run.train(steps, HYPERS[:2])
        return peak_rss_bytes() - before
    finally:
        run.close()


def print_bytes(first: int, count: int) -> None:
    """A line a seed: what its plan took, was to take at the most, and has from the start."""
    warm = random_plan(random.Random(0), model_spec(middling(False)), ROWS)
    taken_bytes(False, warm)  # libraries, threads
    for seed in range(first, first + count):
        dice = random.Random(seed)
        tied = dice.random() < 0.5
        plan = random_plan(dice, model_spec(middling(tied)), ROWS)
        print("bytes", seed, taken_bytes(tied, plan), *planned_bytes(tied, plan), flush=True)


def within_account(first: int, count: int) -> None:
    """In a process whose malloc gives back what is freed: what it holds on to depends on what ran before."""
    code = f"from tests.engine.test_random_plans import print_bytes; print_bytes({first}, {count})"
    quick_to_return = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=quick_to_return, capture_output=True, text=True, check=True
    )
    rows = [[int(word) for word in line.split()[1:]] for line in done.stdout.splitlines() if line.startswith("bytes")]
    assert [row[0] for row in rows] == list(range(first, first + count))
    for seed, taken, planned, fixed in rows:
        assert taken <= planned + SLACK_BYTES, f"seed {seed}: {taken / MIB:.0f} MiB taken, {planned / MIB:.0f} planned"
        assert taken >= 0.7 * fixed, f"seed {seed}: {taken / MIB:.0f} MiB taken of {fixed / MIB:.0f} that must be there"


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 10, 20])
def test_no_random_plan_takes_more_memory_than_its_account(first: int) -> None:
    within_account(first, 10)

"""One small model under many budgets: the planner chooses other plans, and each gives the plain loop's bits.

The machine is the H200 that MegaTrain comes with. Budgets lie between the least that the model needs and the most that
makes it faster, as 8 to 48 GiB do for one of billions of parameters. To start an op takes a thousandth of what it does
there: a model this small would do nothing else, and all plans were the same to it.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from transformers import LlamaConfig

from megatrain.config import RunConfig, resolved
from megatrain.hardware.described import read_machine
from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from megatrain.planner import Question, least_bytes, memory_table, question_of, search
from megatrain.schedule.plan import Plan, Tier
from tests import reference
from tests.engine.random_plans import Following
from tests.engine.streamed import CHUNK_TOKENS, same_bytes
from tests.families import tiny_batch, tiny_masters

TOKENS, ROWS, STEPS = 64, 4, 2
HYPERS = [AdamW(1e-2 / (k + 1), 0.9, 0.95, 1e-8, 0.1) for k in range(STEPS)]
H200 = read_machine("h200-125gb")
PLANNED_SHARE = 0.95  # of a budget so small; the rest is left to what nobody counts
# Shares of the way from the least to the most: of HBM, and of RAM, where that is short; no number: all there is.
BUDGETS = ((0.0, None), (0.1, None), (0.4, None), (0.6, None), (None, None), (0.0, 0.75), (0.1, 0.5))


def small_model() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2 * TOKENS, tie_word_embeddings=False,
    )  # fmt: skip


def asked(**budgets: int) -> Question:
    """What a run asks with these budgets in its config."""
    config = RunConfig.model_validate({
        "model": "m", "dataset": "d", "max_length": TOKENS, "train_batch_size": ROWS, "micro_batch_tokens": TOKENS,
        "loss_chunk_tokens": CHUNK_TOKENS, "save_strategy": "no",
        "memory": {tier: f"{num_bytes}B" for tier, num_bytes in budgets.items()},
    })  # fmt: skip
    rates = replace(H200.rates, op_s=H200.rates.op_s / 1000)
    return question_of(model_spec(small_model()), resolved(config, "cuda", 2), H200.machine, rates)


@functools.cache
def chosen(**budgets: int) -> Plan:
    """The plan that is chosen, which fits."""
    plan = search(asked(**budgets))
    assert memory_table(asked(**budgets), plan).overall == "FITS"
    return plan


def between(tier: Tier, share: float, **others: int) -> int:
    """A budget of `tier`, at that share of the way."""
    question = asked(**others)
    least, most = least_bytes(question, tier), memory_table(question, chosen(**others)).total_bytes(tier)
    assert least is not None
    return int((least + share * (most - least)) / PLANNED_SHARE) + 1


def plans() -> dict[tuple[float | None, float | None], Plan]:
    """Shares -> the plan that is chosen."""
    found = {}
    for hbm_share, ram_share in BUDGETS:
        budgets = {} if hbm_share is None else {"hbm": between("hbm", hbm_share)}
        if ram_share is not None:
            budgets["ram"] = between("ram", ram_share, **budgets)
        found[hbm_share, ram_share] = chosen(**budgets)
    return found


def steps_on(device: str) -> list[list[TokenBatch]]:
    """2 steps of 4 micro-batches in uneven documents."""
    cuts = [(40, 24), (64,), (9, 9, 46), (1, 63)]
    made = [[tiny_batch(cut, seed=10 * s + i, vocab_size=512) for i, cut in enumerate(cuts)] for s in range(STEPS)]
    return [[TokenBatch(*(tensor.to(device) for tensor in batch)) for batch in step] for step in made]


def every_plan_gives_the_plain_loops_bits(device: str, precision: str) -> None:
    config, steps = small_model(), steps_on(device)
    masters = tiny_masters(model_spec(config))
    want = reference.train(
        config, masters, steps, HYPERS, precision=precision, max_grad_norm=1.0, chunk_tokens=CHUNK_TOKENS,
        attn_implementation="megatrain", device=device,
    )  # fmt: skip
    assert all(norm > 1.0 for norm in want.grad_norms), "clipping must be at work, or this proves less"
    for shares, plan in plans().items():
        run = Following(config, masters, TOKENS, plan, precision=precision, device=device)
        try:
            results = run.train(steps, HYPERS)
            assert [r.loss for r in results] == want.losses, shares
            assert [r.grad_norm for r in results] == want.grad_norms, shares
            assert same_bytes(run.state(), want.state) == [], shares
        finally:
            run.close()


def test_the_planner_chooses_other_plans_for_other_budgets() -> None:
    found = plans()
    assert len(set(found.values())) == len(BUDGETS)
    in_hbm = [sum(s.state == "hbm" for s in found[share, None].segments) for share in (0.0, 0.1, 0.4, 0.6, None)]
    assert in_hbm == sorted(set(in_hbm)), "with more of it more stays in HBM"
    assert (in_hbm[0], in_hbm[-1]) == (0, 8)
    blocks = [block for plan in found.values() for block in plan.blocks]
    assert {block.activations for block in blocks} >= {"recompute", "offload", "keep"}
    assert {plan.clip_mode for plan in found.values()} == {"deferred", "two-pass"}
    assert {plan.round_micro_batches for plan in found.values()} == {1, 4}
    on_disk = {shares: sum(s.state_on_disk for s in plan.segments) for shares, plan in found.items()}
    assert all((count > 0) == (ram_share is not None) for (_, ram_share), count in on_disk.items())


def test_no_budget_changes_a_bit() -> None:
    every_plan_gives_the_plain_loops_bits("cpu", "fp32")

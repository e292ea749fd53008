"""Router loss, dropout and rotary tables by document on a GPU: the reference's bits eager, one result compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig

from megatrain.models.dice import thrown
from megatrain.models.router import Balance, sums_of, tally_of
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes
from tests.families import tiny_batch, tiny_config, tiny_masters
from tests.models.test_dropout import DROPPING
from tests.models.test_router_loss import balanced_config, formula

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
TOKENS = 128
HYPERS = [AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1)] * 2
STEPS = [[tiny_batch(cut, seed=10 * step + i) for i, cut in enumerate([(90, 38), (128,)])] for step in range(2)]
WAYS = [
    *("router loss of mixtral", "router loss of gpt_oss", "dropout of gpt2", "dropout of starcoder2"),
    *("dropout of mixtral", "tables of llama-dynamic", "tables of phi3-longrope"),
]
ROUNDS = Placement(keep=True, round_micro_batches=1, weight_slots=3)


def config_of(way: str) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The config, and what the reference is told."""
    what, case = way.split(" of ")
    if what == "router loss":
        return balanced_config(case), {"router_loss": formula(balanced_config(case))}
    return tiny_config(case, **DROPPING.get(case, {})), {"dice_seed": 0} if what == "dropout" else {}


def trained(
    config: PreTrainedConfig, placement: Placement, *, compiled: bool
) -> tuple[list[float], dict[str, tuple[np.ndarray, ...]]]:
    masters = tiny_masters(model_spec(config))
    run = Streamed(
        config, masters, TOKENS, precision="bf16", placement=placement, device=DEVICE, compiled=compiled
    )  # fmt: skip
    try:
        return [result.loss for result in run.train(STEPS, HYPERS)], run.state()
    finally:
        run.close()


@pytest.mark.parametrize("way", WAYS)
def test_two_steps_are_the_references(way: str) -> None:
    config, settings = config_of(way)
    on_device = [[type(b)(*(t.to(DEVICE) for t in b)) for b in step] for step in STEPS]
    want = reference.train(
        config, tiny_masters(model_spec(config)), on_device, HYPERS, precision="bf16", max_grad_norm=1.0,
        chunk_tokens=CHUNK_TOKENS, device=DEVICE, **settings,
    )  # fmt: skip
    for placement in (Placement(), ROUNDS):
        losses, state = trained(config, placement, compiled=False)
        assert losses == want.losses
        assert same_bytes(state, want.state) == []


@pytest.mark.parametrize("way", WAYS)
def test_compiled_layers_give_one_result(way: str) -> None:
    torch._dynamo.reset()
    config, _ = config_of(way)
    (recomputed, first), (kept, second) = (trained(config, p, compiled=True) for p in (Placement(), ROUNDS))
    assert recomputed == kept
    assert same_bytes(first, second) == []


def test_nothing_waits_for_the_device() -> None:
    batch = type(STEPS[0][0])(*(t.to(DEVICE) for t in STEPS[0][0]))
    logits_TE = torch.randn(TOKENS, 8, device=DEVICE, requires_grad=True)
    balance = Balance(0.1, 8, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with thrown(3, torch.device(DEVICE)):
            torch.rand(8, device=DEVICE)
        tally = tally_of(batch)
        tally.add(sums_of([logits_TE], tally.counted_T, balance))
        tally.settle(balance, 0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")

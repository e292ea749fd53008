"""Every micro-batch's gradient counts exactly once, whatever the rounds: seen without the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from tests.engine.streamed import Placement, Streamed
from tests.families import tiny_batch, tiny_config, tiny_masters

NUM, TOKENS, FIRST_TOKEN = 5, 24, 11
HYPER = AdamW(1e-2, 0.9, 0.95, 1e-8, 0.0)
NUM_SUPERVISED = 97  # of the step; what the micro-batches hold does not matter here


def micro_batch(k: int):
    """Micro-batch k reads nothing but token FIRST_TOKEN + k."""
    batch = tiny_batch((TOKENS,), seed=k)
    return batch._replace(input_ids_T=torch.full_like(batch.input_ids_T, FIRST_TOKEN + k))


def embedding_moments(chosen: list[int], placement: Placement) -> np.ndarray:
    """m of the embedding table after one step of these micro-batches: a tenth of its gradient."""
    config = tiny_config("llama")
    spec = model_spec(config)
    assert not spec.tied
    run = Streamed(config, tiny_masters(spec), TOKENS, precision="fp32", placement=placement, max_grad_norm=None)
    try:
        run.engine.train_step([micro_batch(k) for k in chosen], NUM_SUPERVISED, HYPER)
        return run.state()["model.embed_tokens.weight"][1]
    finally:
        run.close()


@pytest.mark.parametrize("rounds_of", [1, 2, NUM])
@pytest.mark.parametrize("keep", [False, True])
def test_each_row_has_the_gradient_of_its_own_micro_batch(rounds_of: int, keep: bool) -> None:
    placement = Placement(round_micro_batches=rounds_of, keep=keep, grad_slots=1)
    together = embedding_moments(list(range(NUM)), placement)
    touched = np.flatnonzero(together.any(axis=1))
    assert touched.tolist() == [FIRST_TOKEN + k for k in range(NUM)]
    for k in (0, 2, NUM - 1):
        alone = embedding_moments([k], placement)
        assert np.flatnonzero(alone.any(axis=1)).tolist() == [FIRST_TOKEN + k]
        assert together[FIRST_TOKEN + k].tobytes() == alone[FIRST_TOKEN + k].tobytes()

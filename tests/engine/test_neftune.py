"""NEFTune: noise that depends on the element alone; the engine equals the reference loop with it, at any placement."""

from __future__ import annotations

import pytest

from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes
from tests.families import tiny_batch, tiny_config, tiny_masters

HYPERS = [AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1)] * 2
STEPS = [[tiny_batch(cut, seed=3 * step + i) for i, cut in enumerate([(17, 23), (40,), (9, 31)])] for step in range(2)]
NEFTUNE = (5.0, 11)
PLACEMENTS = [Placement(round_micro_batches=1), Placement(round_micro_batches=3, keep=True, weight_slots=3)]


@pytest.mark.parametrize(("family", "precision"), [("llama", "fp32"), ("llama", "bf16"), ("gemma3", "bf16")])
def test_noise_equals_the_reference_at_any_placement(family: str, precision: str) -> None:
    config = tiny_config(family)
    masters = tiny_masters(model_spec(config))
    want, plain = (
        reference.train(
            config, masters, STEPS, HYPERS, precision=precision, max_grad_norm=1.0, chunk_tokens=CHUNK_TOKENS,
            attn_implementation="megatrain", neftune=neftune,
        )
        for neftune in (NEFTUNE, None)
    )  # fmt: skip
    assert want.losses[0] != plain.losses[0]
    for placement in PLACEMENTS:
        run = Streamed(config, masters, 40, precision=precision, placement=placement, neftune=NEFTUNE)
        quiet = Streamed(config, masters, 40, precision=precision, placement=placement)
        try:
            assert run.engine.evaluate(STEPS[0]) == quiet.engine.evaluate(STEPS[0]), "evaluation is without noise"
            assert [result.loss for result in run.train(STEPS, HYPERS)] == want.losses
            assert same_bytes(run.state(), want.state) == []
        finally:
            run.close()
            quiet.close()

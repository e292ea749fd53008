"""Label smoothing in the engine is that of the reference loop, bit for bit; evaluation has none."""

from __future__ import annotations

import pytest

from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes
from tests.families import tiny_batch, tiny_config, tiny_masters

HYPERS = [AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1)] * 2
STEPS = [[tiny_batch(cut, seed=2 * step + i) for i, cut in enumerate([(17, 23), (40,)])] for step in range(2)]


@pytest.mark.parametrize(("family", "precision"), [("llama", "fp32"), ("llama", "bf16")])
def test_label_smoothing_equals_the_reference(family: str, precision: str) -> None:
    config = tiny_config(family)
    masters = tiny_masters(model_spec(config))
    want, plain = (
        reference.train(
            config, masters, STEPS, HYPERS, precision=precision, max_grad_norm=1.0, chunk_tokens=CHUNK_TOKENS,
            attn_implementation="megatrain", label_smoothing=smoothing,
        )
        for smoothing in (0.1, 0.0)
    )  # fmt: skip
    run = Streamed(
        config, masters, 40, precision=precision, placement=Placement(round_micro_batches=1), label_smoothing=0.1
    )
    try:
        losses = [result.loss for result in run.train(STEPS, HYPERS)]
        assert losses == want.losses
        assert losses[0] > plain.losses[0], "smoothing costs"
        assert same_bytes(run.state(), want.state) == []
        supervised = sum(int((batch.labels_T >= 0).sum()) for batch in STEPS[0])
        smoothed = run.train(STEPS[:1], HYPERS[:1])[0].loss
        assert run.engine.evaluate(STEPS[0]) / supervised < smoothed, "evaluation measures without smoothing"
    finally:
        run.close()

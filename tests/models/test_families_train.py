"""Every accepted family through the engine: three steps give the reference's loss, norm, weights, m and v.

And out to a folder: transformers opens what was written, and MegaTrain loads what transformers wrote.
"""

from __future__ import annotations

import pytest

from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes
from tests.families import CASES, tiny_batch, tiny_buffers, tiny_config, tiny_masters

TOKENS = 24
MAX_NORM = 0.1
PLACEMENTS = {"fp32": Placement(), "bf16": Placement(keep=True)}  # test_families has the others in its quick list
HYPERS = [AdamW(1e-2 / (k + 1), 0.9, 0.95, 1e-8, 0.1) for k in range(3)]
STEPS = [[tiny_batch(cut, seed=10 * step + i) for i, cut in enumerate([(11, 13), (24,)])] for step in range(3)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_three_steps_are_the_references(case: str, precision: str) -> None:
    config = tiny_config(case)
    masters = tiny_masters(model_spec(config))
    run = Streamed(config, masters, TOKENS, precision=precision, placement=PLACEMENTS[precision], max_grad_norm=MAX_NORM)
    try:
        buffers = tiny_buffers(run.template)
        for name, buffer in run.template.saved_buffers.items():
            buffer.copy_(buffers[name])
        results = run.train(STEPS, HYPERS)
        state = run.state()
    finally:
        run.close()
    want = reference.train(
        config, masters, STEPS, HYPERS, precision=precision, max_grad_norm=MAX_NORM, chunk_tokens=CHUNK_TOKENS,
        buffers=buffers,
    )  # fmt: skip
    assert [r.loss for r in results] == want.losses
    assert [r.grad_norm for r in results] == want.grad_norms
    assert all(norm > MAX_NORM for norm in want.grad_norms), "clipping must be at work, or this proves less"
    assert same_bytes(state, want.state) == []
    assert all(w.tobytes() != masters[name].tobytes() for name, (w, _, _) in state.items())

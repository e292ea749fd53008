"""The running average of the masters on a GPU has the bits of the plain loop, wherever it lives."""

from __future__ import annotations

import pytest

from megatrain.models.spec_of import model_spec
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes
from tests.families import tiny_config, tiny_masters
from tests.gpu.test_quick_gpu import FAMILY, HOMES, HYPERS, SLOTS, TOKENS, batches

pytestmark = pytest.mark.gpu

DECAY = 0.9
ALL = frozenset({"EMBED", "L000", "L001", "HEAD"})
DISK = Placement(state_on_disk=ALL, weights_on_disk=ALL, threads=2)
TWO_PASSES = Placement(two_pass=True, resident=frozenset({"L000"}), threads=2)


@pytest.mark.parametrize("placement", [SLOTS, HOMES, DISK, TWO_PASSES], ids=["slots", "homes", "disk", "two-pass"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_averages_equal_the_plain_loops(precision: str, placement: Placement) -> None:
    config = tiny_config(FAMILY)
    masters = tiny_masters(model_spec(config))
    want = reference.train(
        config, masters, batches(), HYPERS, precision=precision, max_grad_norm=1.0, chunk_tokens=CHUNK_TOKENS,
        attn_implementation="megatrain", device="cuda", ema_decay=DECAY,
    )  # fmt: skip
    run = Streamed(config, masters, TOKENS, precision=precision, placement=placement, device="cuda", ema_decay=DECAY)
    try:
        run.train(batches(), HYPERS)
        found = run.averages()
        assert found.keys() == want.averages.keys()
        assert [name for name, value in found.items() if value.tobytes() != want.averages[name].tobytes()] == []
        assert same_bytes(run.state(), want.state) == []
    finally:
        run.close()

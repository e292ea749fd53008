"""Seconds on a GPU that notice most faults of lanes, copies and kernels: the whole step against the plain loop.

The mutants that only a GPU can show (`python -m tests.mutation --device cuda`) are killed by these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from megatrain.engine import Engine
from megatrain.engine.chaos import Chaos
from megatrain.memory import pinned
from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes
from tests.families import tiny_batch, tiny_config, tiny_masters

pytestmark = pytest.mark.gpu

FAMILY, TOKENS = "smollm2", 128  # tied, and its head size is one of those that attention pads
HYPERS = [AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1), AdamW(5e-3, 0.9, 0.95, 1e-8, 0.1)]
HOMES = Placement(
    resident=frozenset({"L000"}), streamed=frozenset({"EMBED", "L001"}), state_slots=1, round_micro_batches=2, threads=2
)
SLOTS = Placement(threads=2)


def batches() -> list[list[TokenBatch]]:
    """2 steps of 3 micro-batches in uneven documents."""
    cuts = [(100, 28), (128,), (17, 19, 92)]
    made = [[tiny_batch(cut, seed=10 * step + i) for i, cut in enumerate(cuts)] for step in range(2)]
    return [[TokenBatch(*(tensor.cuda() for tensor in batch)) for batch in step] for step in made]


@functools.cache
def plain(precision: str) -> reference.Result:
    config = tiny_config(FAMILY)
    return reference.train(
        config, tiny_masters(model_spec(config)), batches(), HYPERS, precision=precision, max_grad_norm=1.0,
        chunk_tokens=CHUNK_TOKENS, attn_implementation="megatrain", device="cuda",
    )  # fmt: skip


def differs(precision: str, placement: Placement, chaos: Chaos | None = None,
            between: Callable[[Engine], object] = lambda _: None) -> list[str]:  # fmt: skip
    """The tensors that the engine leaves with other bits than the plain loop. `between`: done after each step."""
    config = tiny_config(FAMILY)
    run = Streamed(
        config, tiny_masters(model_spec(config)), TOKENS, precision=precision, placement=placement, chaos=chaos,
        device="cuda",
    )  # fmt: skip
    try:
        for step, hyper in zip(batches(), HYPERS, strict=True):
            run.train([step], [hyper])
            between(run.engine)
        return same_bytes(run.state(), plain(precision).state)
    finally:
        run.close()


@pytest.mark.parametrize("placement", [SLOTS, HOMES], ids=["slots", "homes"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_two_steps_equal_the_plain_loop(precision: str, placement: Placement) -> None:
    assert differs(precision, placement) == []


@pytest.mark.parametrize("placement", [SLOTS, HOMES], ids=["slots", "homes"])
def test_late_lanes_change_no_bit(placement: Placement) -> None:
    """Each op may start up to 2 ms late, long for ops of microseconds: a wait that is missing is a wrong bit."""
    for seed in range(6):
        found = differs("bf16", placement, Chaos(seed, max_delay_s=0.002))
        assert found == [], f"replay with Chaos({seed}, max_delay_s=0.002) and {placement}"


def test_updates_that_wait_are_done_by_whatever_comes_next() -> None:
    """Those that would pass through the device in the next step are done on the host by an evaluation or a save."""
    held_out = batches()[0]
    assert differs("bf16", HOMES, between=lambda engine: engine.evaluate(held_out)) == []
    assert differs("bf16", HOMES, between=lambda engine: engine.save(lambda _: None)) == []


def test_copies_in_pieces_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of buffers of several GiB, whose every piece is pinned by itself."""
    monkeypatch.setattr(pinned, "PIECE_BYTES", 4096)
    assert differs("bf16", HOMES) == []

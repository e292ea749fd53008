"""The core's own threads: work of many pieces, several calls at once. Also what ThreadSanitizer watches."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from megatrain import optim
from megatrain.optim import native, spec
from tests.optim.values import same_bits, training_state

PIECE = 1 << 18  # elements a thread takes at a time
COUNT = 5 * PIECE + 77  # six pieces, the last one short
SCALARS = optim.scalars(optim.AdamW(learning_rate=3e-4, weight_decay=0.1), 3, 0.5)

pytestmark = pytest.mark.skipif(not native.isas(), reason="installed without a C++ compiler")


@pytest.mark.parametrize("threads", [2, 5, 16])
def test_pieces_meet_without_a_gap_or_an_overlap(threads: int) -> None:
    w, m, v, grad = training_state(COUNT)
    hi, lo = optim.split(w)
    expected = spec.adamw(w, m, v, grad, SCALARS, decay=True)
    m_split, v_split = m.copy(), v.copy()
    optim.update_split(hi, lo, m_split, v_split, grad, SCALARS, decay=True, threads=threads)
    same_bits(optim.join(hi, lo), expected[0])
    same_bits(v_split, expected[2])
    optim.update_fp32(w, m, v, grad, SCALARS, decay=True, threads=threads)
    for found, wanted in zip((w, m, v), expected, strict=True):
        same_bits(found, wanted)


@pytest.mark.parametrize("shape", [(2 * PIECE + 5,), (1001, 1024), (3, PIECE)])
def test_any_number_of_threads_gives_one_sum(shape: tuple[int, ...]) -> None:
    grad = training_state(int(np.prod(shape)))[3].reshape(shape)
    assert {optim.tensor_sum_squares(grad, threads=threads) for threads in (1, 7)} == {spec.tensor_sum_squares(grad)}


def test_calls_from_several_threads_at_once_do_not_meet() -> None:
    """As the engine's lanes do: an update of one segment beside the norm of another."""
    states = [training_state(2 * PIECE + 64 * seed, seed) for seed in range(3)]
    expected = [spec.adamw(*state, SCALARS, decay=False)[0] for state in states]
    sums = [spec.tensor_sum_squares(state[3].reshape(64, -1)) for state in states]
    found: dict[int, float] = {}

    def work(index: int) -> None:
        w, m, v, grad = states[index]
        optim.update_fp32(w, m, v, grad, SCALARS, decay=False, threads=2)
        found[index] = optim.tensor_sum_squares(grad.reshape(64, -1), threads=3)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for (w, *_), wanted in zip(states, expected, strict=True):
        same_bits(w, wanted)
    assert [found[index] for index in range(3)] == sums

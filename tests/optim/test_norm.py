from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain import optim
from megatrain.optim import native
from tests.optim.values import ISAS, SPECIAL, at_offset

SHAPES = [
    (), (1,), (255,), (257,), (5_003,), (1, 1), (3, 1), (1, 30_001), (700, 3), (5, 255), (5, 256), (7, 257),
    (3, 4097), (2, 3, 700), (131, 517), (0,), (0, 4), (4, 0),
]  # fmt: skip


def by_hand(values):
    """The rule for one list of numbers, one addition at a time."""
    lanes = [0.0] * 256
    for i, value in enumerate(values):
        lanes[i % 256] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


def sum_by_hand(grad):
    if grad.size == 0:
        return 0.0
    leaves = [leaf.ravel().astype(np.float64) for leaf in (grad if grad.ndim else grad[None])]
    return by_hand([by_hand([float(x) * float(x) for x in leaf]) for leaf in leaves])


def gradient(shape, seed=0):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-6, 2, shape)
    return np.asarray(rng.standard_normal(shape) * scale, np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rule_one_addition_at_a_time(isa, shape):
    grad = gradient(shape)
    assert optim.tensor_sum_squares(grad, 1, isa=isa) == sum_by_hand(grad)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=3).filter(lambda s: math.prod(s) < 20_000), st.integers(0, 99)
)
def test_any_shape_follows_the_rule(isa, shape, seed):
    grad = gradient(tuple(shape), seed)
    assert optim.tensor_sum_squares(grad, 2, isa=isa) == sum_by_hand(grad)


@pytest.mark.parametrize("shape", [(1031, 517), (3, 300_001), (600_011,)], ids=str)
def test_threads_and_placement_change_no_bit(shape):
    grad = gradient(shape)
    reference = optim.tensor_sum_squares(grad, 1)
    assert reference != float((grad.astype(np.float64) ** 2).sum())  # the order is visible in these bits
    assert optim.tensor_sum_squares(grad, 1, isa=native.NUMPY) == reference
    for isa in native.isas():
        for threads in (1, 2, 3, 16):
            for offset in (0, 1, 13):
                moved = at_offset(grad.ravel(), offset).reshape(shape)
                assert optim.tensor_sum_squares(moved, threads, isa=isa) == reference


@pytest.mark.parametrize("isa", ISAS)
def test_huge_gradients_do_not_overflow_and_non_finite_ones_show(isa):
    grad = np.full((8, 300), 1e30, np.float32)
    norm = optim.total_norm([optim.tensor_sum_squares(grad, isa=isa)])
    assert norm == pytest.approx(float(np.float32(1e30)) * math.sqrt(2400), rel=1e-12)
    assert math.isinf(optim.tensor_sum_squares(np.array([1.0, -np.inf], np.float32), isa=isa))
    assert math.isnan(optim.tensor_sum_squares(SPECIAL, isa=isa))
    assert optim.tensor_sum_squares(np.full(3, 1e-45, np.float32), isa=isa) > 0.0


def test_total_norm_adds_in_the_given_order():
    assert optim.total_norm([1e16, 1.0, 1.0]) == math.sqrt(1e16)
    assert optim.total_norm([1.0, 1.0, 1e16]) == math.sqrt(1e16 + 2)
    assert optim.total_norm([]) == 0.0


def test_clip_coefficient():
    assert optim.clip_coefficient(5.0, None) == 1.0
    assert optim.clip_coefficient(0.0, 1.0) == 1.0
    assert optim.clip_coefficient(1.0, 1.0) == 1.0
    assert optim.clip_coefficient(3.0, 1.0) == float(np.float32(1 / 3))
    for norm in (math.nan, math.inf):
        with pytest.raises(ValueError, match="non-finite step must be skipped"):
            optim.clip_coefficient(norm, 1.0)
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm is"):
            optim.clip_coefficient(1.0, bad)


def test_bad_gradients_are_refused():
    with pytest.raises(ValueError, match="float64"):
        optim.tensor_sum_squares(np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        optim.tensor_sum_squares(np.zeros((4, 4), np.float32).T)
    with pytest.raises(ValueError, match="threads is 0"):
        optim.tensor_sum_squares(np.zeros(3, np.float32), 0)

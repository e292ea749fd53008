from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megatrain import optim
from megatrain.optim import spec
from tests.optim.values import ISAS, at_offset, same_bits, special_state, training_state

HYPER = optim.AdamW(learning_rate=3e-4, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
SIZES = [0, 1, *range(3, 35), 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 1023, 1025, 4095, 4096, 4097]


def updated_fp32(state, scalars, **options):
    w, m, v, grad = (a.copy() for a in state)
    optim.update_fp32(w, m, v, grad, scalars, **options)
    same_bits(grad, state[3])
    return w, m, v


def updated_split(state, scalars, **options):
    hi, lo = spec.split(state[0])
    m, v, grad = (a.copy() for a in state[1:])
    optim.update_split(hi, lo, m, v, grad, scalars, **options)
    same_bits(grad, state[3])
    return hi, lo, m, v


def check_both(state, scalars, *, decay, threads, isa):
    for actual, expected in zip(
        updated_fp32(state, scalars, decay=decay, threads=threads, isa=isa),
        spec.adamw(*state, scalars, decay=decay),
        strict=True,
    ):
        same_bits(actual, expected)
    w, m, v, grad = state
    hi, lo, m1, v1 = updated_split(state, scalars, decay=decay, threads=threads, isa=isa)
    w_expected, m_expected, v_expected = spec.adamw(w, m, v, grad, scalars, decay=decay)
    same_bits(m1, m_expected)
    same_bits(v1, v_expected)
    same_bits(spec.join(hi, lo), w_expected)
    is_number = ~np.isnan(w_expected)
    same_bits(hi[is_number], spec.split(w_expected)[0][is_number])


def test_the_formula_by_hand():
    s = spec.Scalars(
        coefficient=0.5, lerp=0.25, beta2=0.5, square=0.5, step_size=0.5, bias2_sqrt=0.5, epsilon=1.0, decay_mul=0.75
    )
    w, m, v, grad = (np.array([x], np.float32) for x in (8.0, 4.0, 1.5, 4.0))
    for decay, w_expected in ((True, 6.0), (False, 8.0)):
        # g = 2; m' = 4 - 2/4; v' = 0.75 + 2; d = sqrt(2.75) / 0.5 + 1
        d = np.float32(np.sqrt(np.float32(2.75))) / np.float32(0.5) + np.float32(1.0)
        w1, m1, v1 = spec.adamw(w, m, v, grad, s, decay=decay)
        assert (m1[0], v1[0]) == (3.5, 2.75)
        assert w1[0] == np.float32(w_expected) - np.float32(1.75) / d


def test_scalars_come_from_the_integer_step_in_fp64():
    s = optim.scalars(HYPER, 10, 0.1)
    assert s.step_size == float(np.float32(3e-4 / (1 - 0.9**10)))
    assert s.bias2_sqrt == float(np.float32(math.sqrt(1 - 0.95**10)))
    assert (s.lerp, s.beta2, s.square) == tuple(float(np.float32(x)) for x in (1 - 0.9, 0.95, 1 - 0.95))
    assert (s.epsilon, s.decay_mul, s.coefficient) == tuple(float(np.float32(x)) for x in (1e-8, 1 - 3e-4 * 0.1, 0.1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_equals_the_specification(isa, size):
    check_both(training_state(size, size), optim.scalars(HYPER, 7, 0.37), decay=True, threads=1, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("decay", [True, False])
def test_special_values_equal_the_specification(isa, decay):
    check_both(special_state(20_000), optim.scalars(HYPER, 2, 1.0), decay=decay, threads=1, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_counts_change_nothing(isa, threads):
    state = training_state(3 * (1 << 18) + 77)  # more pieces than threads, the last one short
    check_both(state, optim.scalars(HYPER, 3, 0.9), decay=True, threads=threads, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("offset", [1, 3, 5, 7])
def test_odd_offsets_equal_the_specification_and_touch_nothing_beside(isa, offset):
    state = training_state(1003, offset)
    scalars = optim.scalars(HYPER, 5, 1.0)
    w, m, v, grad = (at_offset(a, offset) for a in state)
    optim.update_fp32(w, m, v, grad, scalars, decay=True, threads=2, isa=isa)
    hi, lo = (at_offset(a, offset) for a in spec.split(state[0]))
    m2, v2 = at_offset(state[1], offset), at_offset(state[2], offset)
    optim.update_split(hi, lo, m2, v2, grad, scalars, decay=True, threads=2, isa=isa)
    expected = spec.adamw(*state, scalars, decay=True)
    for actual, want in zip((w, m, v, m2, v2, spec.join(hi, lo)), (*expected, *expected[1:], expected[0]), strict=True):
        same_bits(actual, want)
    for view in (w, m, v, grad, hi, lo, m2, v2):
        assert not view.base[:offset].any()
        assert not view.base[offset + view.size :].any()


@pytest.mark.parametrize("isa", ISAS)
def test_any_bits_equal_the_specification(isa):
    any_bits = arrays(np.uint32, st.shared(st.integers(0, 70), key="size"), elements=st.integers(0, 2**32 - 1))

    @settings(max_examples=100, deadline=None)
    @given(any_bits, any_bits, any_bits, any_bits, st.integers(1, 10**6), st.floats(0, 1), st.booleans())
    def check(w, m, v, grad, step, coefficient, decay):
        state = tuple(a.view(np.float32) for a in (w, m, v, grad))
        check_both(state, optim.scalars(HYPER, step, coefficient), decay=decay, threads=1, isa=isa)

    check()


@pytest.mark.parametrize("isa", ISAS)
def test_small_updates_are_never_lost(isa):
    """An update of 1e-7 of the weight, 10,000 times: the split master moves as fp32 does; hi alone would not."""
    w = np.random.default_rng(0).uniform(0.5, 1.0, 256).astype(np.float32)
    start = w.copy()
    hi, lo = spec.split(w)
    m, v, m2, v2 = (np.zeros(256, np.float32) for _ in range(4))
    grad = np.ones(256, np.float32)
    hyper = optim.AdamW(learning_rate=1e-7, beta1=0.9, beta2=0.95, epsilon=0.0)
    for step in range(1, 10_001):
        scalars = optim.scalars(hyper, step, 1.0)
        optim.update_split(hi, lo, m, v, grad, scalars, decay=False, threads=1, isa=isa)
        optim.update_fp32(w, m2, v2, grad, scalars, decay=False, threads=1, isa=isa)
    same_bits(spec.join(hi, lo), w)
    assert (start - w).min() > 0.9e-3
    assert (hi != spec.split(start)[0]).mean() > 0.1


BAD_CALLS = {
    "dtype": (lambda a: (a[0].astype(np.float64), *a[1:]), "w is 1-D float64"),
    "length": (lambda a: (a[0], a[1][:-1], *a[2:]), "differ in length"),
    "shape": (lambda a: (a[0].reshape(2, 4), *a[1:]), "w is 2-D"),
    "strides": (lambda a: (np.zeros(16, np.float32)[::2], *a[1:]), "contiguous"),
    "overlap": (lambda a: (a[0], a[0], *a[2:]), "w and m overlap"),
    "alignment": (lambda a: (np.zeros(33, np.uint8)[1:].view(np.float32), *a[1:]), "aligned"),
    "read-only": (lambda a: (np.broadcast_to(np.float32(1), 8).copy(), a[1], read_only(a[2]), a[3]), "v is read-only"),
}


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_spans_are_refused_by_name(isa, case):
    spoil, message = BAD_CALLS[case]
    spans = spoil([np.zeros(8, np.float32) for _ in range(4)])
    with pytest.raises(ValueError, match=message):
        optim.update_fp32(*spans, optim.scalars(HYPER, 1, 1.0), decay=True, threads=1, isa=isa)


def test_a_read_only_gradient_is_fine():
    w, m, v, grad = training_state(10)
    expected = spec.adamw(w, m, v, grad, optim.scalars(HYPER, 1, 1.0), decay=True)
    optim.update_fp32(w, m, v, read_only(grad), optim.scalars(HYPER, 1, 1.0), decay=True, threads=1)
    same_bits(w, expected[0])


def test_bad_numbers_are_refused():
    spans = [np.zeros(8, np.float32) for _ in range(4)]
    with pytest.raises(ValueError, match="threads is 0"):
        optim.update_fp32(*spans, optim.scalars(HYPER, 1, 1.0), decay=True, threads=0)
    with pytest.raises(ValueError, match="isa is 'sse9'"):
        optim.update_fp32(*spans, optim.scalars(HYPER, 1, 1.0), decay=True, threads=1, isa="sse9")
    with pytest.raises(ValueError, match="step is 0"):
        optim.scalars(HYPER, 0, 1.0)
    with pytest.raises(ValueError, match="clip coefficient is nan"):
        optim.scalars(HYPER, 1, math.nan)
    for field, value in (("beta1", 1.0), ("beta2", -0.1), ("learning_rate", math.inf), ("epsilon", -1.0)):
        with pytest.raises(ValueError, match=f"AdamW {field} is"):
            optim.AdamW(**{"learning_rate": 1e-3, field: value})

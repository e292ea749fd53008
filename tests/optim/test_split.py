from __future__ import annotations

import os

import numpy as np
import pytest

from megatrain import optim
from megatrain.optim import native, spec
from tests.optim.values import ISAS, SPECIAL

# A step that moves nothing: what is left of an update is that it joins the masters and splits them again.
STILL = optim.scalars(optim.AdamW(learning_rate=0.0), 1, 1.0)


def check_patterns(bits, isa, threads=1):
    """All of contract A6 for these bit patterns: the rule's, and that of the update that joins and splits."""
    hi, lo = spec.split(bits.view(np.float32))
    back = spec.join(hi, lo)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    assert np.array_equal(np.isnan(back), is_nan)
    assert not ((back.view(np.uint32) != bits) & ~is_nan).any()
    new_hi, new_lo = hi.copy(), lo.copy()
    m, v, grad = (np.zeros(bits.size, np.float32) for _ in range(3))
    optim.update_split(new_hi, new_lo, m, v, grad, STILL, decay=False, threads=threads, isa=isa)
    assert not (((new_hi != hi) | (new_lo != lo)) & ~is_nan).any()
    for halves in (hi, new_hi):
        assert np.array_equal((halves & 0x7FFF) > 0x7F80, is_nan)
    return hi, lo


def nearest_bf16(value):
    """Nearest bf16 in fp64 arithmetic, ties away from zero: written apart from the code under test."""
    mantissa, exponent = np.frexp(np.abs(value).astype(np.float64))
    quantum = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    return np.copysign(np.floor(np.abs(value) / quantum + 0.5) * quantum, value) if mantissa.size else value


@pytest.mark.parametrize("isa", ISAS)
def test_sampled_patterns_round_trip(isa):
    rng = np.random.default_rng(0)
    edges = np.arange(-3, 4, dtype=np.int64)[:, None] + (np.arange(0, 1 << 32, 1 << 15, dtype=np.int64)[None])
    bits = np.concatenate([rng.integers(0, 2**32, 200_001, np.uint32), (edges % 2**32).astype(np.uint32).ravel()])
    check_patterns(bits, isa, threads=2)


def test_hi_is_the_nearest_bf16_ties_away():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 200_000, np.uint32)
    bits[:1000] = (bits[:1000] & 0xFFFF0000) | 0x8000  # exact ties
    master = bits.view(np.float32)
    master = master[np.abs(master) < 3.38e38]  # finite, and not rounding up to Inf
    hi, lo = spec.split(master)
    compute = (hi.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(compute.astype(np.float64), nearest_bf16(master.astype(np.float64)))
    assert np.array_equal(lo.astype(np.int64), master.view(np.uint32).astype(np.int64) - (hi.astype(np.int64) << 16))


@pytest.mark.parametrize("isa", ISAS)
def test_special_patterns(isa):
    cases = {  # master bits -> (hi, lo)
        0x00000000: (0x0000, 0),
        0x80000000: (0x8000, 0),
        0x7F800000: (0x7F80, 0),  # Inf stays Inf
        0xFF800000: (0xFF80, 0),
        0x7F7FFFFF: (0x7F80, -1),  # the largest finite value rounds to Inf, and comes back
        0xFF7F8000: (0xFF80, -0x8000),
        0x3F808000: (0x3F81, -0x8000),  # a tie goes away from zero
        0x3F807FFF: (0x3F80, 0x7FFF),
        0x00000001: (0x0000, 1),
        0x7F800001: (0x7FC0, 1),  # a signalling NaN is quieted: rounding would make it Inf
        0x7FFFFFFF: (0x7FFF, -1),  # rounding would make it -0
    }
    bits = np.array(list(cases), np.uint32)
    hi, lo = check_patterns(bits, isa)
    assert list(zip(hi.tolist(), lo.tolist(), strict=True)) == list(cases.values())
    check_patterns(SPECIAL.view(np.uint32), isa)


@pytest.mark.slow
@pytest.mark.skipif(not native.isas(), reason="needs the C++ core to finish in minutes")
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != native.NUMPY])
def test_every_pattern_round_trips(isa):
    chunk = 1 << 20  # what numpy needs beside it then stays in the cache
    for start in range(0, 1 << 32, chunk):
        check_patterns(np.arange(start, start + chunk, dtype=np.uint32), isa, threads=len(os.sched_getaffinity(0)))

"""Triton kernels of the optimizer step. Launched by `update.py`; equal to optim.spec bit for bit.

Every operation rounds on its own: launch with enable_fp_fusion=False, and divide and take roots by div_rn and sqrt_rn
(plain `/` and `sqrt` are approximations). Squares of fp32 numbers are exact in fp64, so there fusion would not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_UPDATE = 1024
NUM_LANES = tl.constexpr(256)
UNROLL = tl.constexpr(8)  # loads in flight per lane: a lane's additions must stay in order, its loads need not


@triton.jit
def adamw_kernel(
    w, lo, m, v, grad, count, coefficient, lerp, beta2, square, step_size, bias2_sqrt, epsilon, decay_mul,
    SPLIT: tl.constexpr, DECAY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """spec.adamw, or spec.adamw_split where SPLIT: then w holds the bits of hi as int16."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    if SPLIT:
        hi_bits = tl.load(w + at, mask=here, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
        lo_bits = tl.load(lo + at, mask=here, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
        master = ((hi_bits << 16) + lo_bits).to(tl.float32, bitcast=True)
    else:
        master = tl.load(w + at, mask=here, other=0.0)
    g = tl.load(grad + at, mask=here, other=0.0) * coefficient
    m_old = tl.load(m + at, mask=here, other=0.0)
    v_old = tl.load(v + at, mask=here, other=0.0)
    m_new = m_old + lerp * (g - m_old)
    v_new = beta2 * v_old + (square * g) * g
    d = tl.div_rn(tl.sqrt_rn(v_new), bias2_sqrt + tl.zeros([BLOCK], tl.float32)) + epsilon
    if DECAY:
        master = master * decay_mul
    master = master - tl.div_rn(step_size * m_new, d)
    tl.store(m + at, m_new, mask=here)
    tl.store(v + at, v_new, mask=here)
    if SPLIT:
        bits = master.to(tl.uint32, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        hi_new = tl.where(is_nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
        tl.store(w + at, hi_new.to(tl.uint16).to(tl.int16, bitcast=True), mask=here)
        tl.store(lo + at, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=here)
    else:
        tl.store(w + at, master, mask=here)


@triton.jit
def _fold(x, HALF: tl.constexpr):
    """x[:HALF] + x[HALF:]"""
    return tl.sum(tl.reshape(x, [2, HALF]), 0)


@triton.jit
def _fold_lanes(x):
    """The end of spec.reduce_lanes: 256 lanes to one number, by halves."""
    x = _fold(_fold(_fold(_fold(x, 128), 64), 32), 16)
    x = _fold(_fold(_fold(_fold(x, 8), 4), 2), 1)
    return tl.sum(x, 0)


@triton.jit
def leaf_kernel(grad, starts, counts, values):
    """values[i] = the sum of squares of leaf i: grad[starts[i]] and the counts[i] - 1 elements after it."""
    leaf = tl.program_id(0)
    source = grad + tl.load(starts + leaf)
    count = tl.load(counts + leaf)
    lane = tl.arange(0, NUM_LANES)
    lanes = tl.zeros([NUM_LANES], tl.float64)
    for first in range(0, count, NUM_LANES * UNROLL):
        for step in tl.static_range(UNROLL):
            at = first + step * NUM_LANES + lane
            g = tl.load(source + at, mask=at < count, other=0.0).to(tl.float64)
            lanes += g * g
    tl.store(values + leaf, _fold_lanes(lanes))


@triton.jit
def tensor_kernel(grad, values, starts, counts, one_element_leaves, sums):
    """sums[i] = the sum of tensor i's leaves: of `values`, or of the squares of `grad` where leaves are elements."""
    tensor = tl.program_id(0)
    start = tl.load(starts + tensor)
    count = tl.load(counts + tensor)
    lane = tl.arange(0, NUM_LANES)
    lanes = tl.zeros([NUM_LANES], tl.float64)
    if tl.load(one_element_leaves + tensor) != 0:
        for first in range(0, count, NUM_LANES * UNROLL):
            for step in tl.static_range(UNROLL):
                at = first + step * NUM_LANES + lane
                g = tl.load(grad + start + at, mask=at < count, other=0.0).to(tl.float64)
                lanes += g * g
    else:
        for first in range(0, count, NUM_LANES * UNROLL):
            for step in tl.static_range(UNROLL):
                at = first + step * NUM_LANES + lane
                lanes += tl.load(values + start + at, mask=at < count, other=0.0)
    tl.store(sums + tensor, _fold_lanes(lanes))

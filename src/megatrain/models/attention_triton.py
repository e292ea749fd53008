"""Triton kernels of the attention operator: forward, and a backward without atomics: the same bits in every run.

Two passes make the backward: `dkdv_kernel` walks the queries of a block of keys, `dq_kernel` the keys of a block of
queries. Both form the scores again; the price is two products in seven, the gain is a fixed order of every sum.

Legend: 1 batch of one, H query heads, G key/value heads, R = H / G, T tokens, D head size of queries and keys, E of
values. Token t sees tokens [low[t], t] and is seen by [t, high[t]); both bounds never decrease. So a block of queries
walks one range of keys, of which only the first blocks (documents, window) and the last (the diagonal) need a mask.
Scores live in units of log2: p = exp2(x * scale_log2 - peak), x = q k^T, or tanh(q k^T * cap_scale) under a soft-cap.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
BLOCK_BOUNDS = 256
BLOCK_DELTA = 32


@triton.jit
def bounds_kernel(
    document_ids_T, low_T, high_T, num_tokens, window,
    ONE_DOCUMENT: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """low[t], high[t] from document ids by binary search, and from the window (0: none). STEPS >= log2(T) + 1."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = t < num_tokens
    low = t * 0
    high = low + num_tokens
    if not ONE_DOCUMENT:
        own = tl.load(document_ids_T + t, mask=inside, other=0)
        low_end = t
        for _ in range(STEPS):
            middle = (low + low_end) // 2
            before = tl.load(document_ids_T + middle, mask=inside, other=0) < own
            low = tl.where(before, middle + 1, low)
            low_end = tl.where(before, low_end, middle)
        high_start = t
        for _ in range(STEPS):
            middle = (high_start + high) // 2
            upto = inside & (middle < num_tokens)
            within = upto & (tl.load(document_ids_T + middle, mask=upto, other=0) <= own)
            high_start = tl.where(within, middle + 1, high_start)
            high = tl.where(within, high, middle)
    if window > 0:
        low = tl.maximum(low, t - window + 1)
        high = tl.minimum(high, t + window)
    tl.store(low_T + t, low, mask=inside)
    tl.store(high_T + t, high, mask=inside)


@triton.jit
def _rows(
    base, first, stride, num_tokens, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + BLOCK) of one head; zeros beyond SIZE columns and, where CHECK, beyond num_tokens rows."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    at = base + tl.cast(first, tl.int64) * stride + row * stride + column
    if CHECK:
        tile = tl.load(at, mask=(first + row < num_tokens) & (column < SIZE), other=0.0)
    elif SIZE == BLOCK_SIZE:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=column < SIZE, other=0.0)
    return tile


@triton.jit
def _store_rows(
    base, first, stride, num_tokens, value, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    at = base + tl.cast(first, tl.int64) * stride + row * stride + column
    tl.store(at, value.to(base.dtype.element_ty), mask=(first + row < num_tokens) & (column < SIZE))


@triton.jit
def _tanh(x):
    """To 1e-7 absolute, without branches; exp2 overflowing to Inf gives 1."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def _key_ranges(low_T, first, num_tokens, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Bounds of the three walks over keys: masked [a, b), full [b, c), masked [c, end)."""
    last = tl.minimum(first + BLOCK_Q, num_tokens) - 1
    a = tl.load(low_T + first) // BLOCK_K * BLOCK_K
    c = first // BLOCK_K * BLOCK_K
    b = tl.minimum(tl.cdiv(tl.load(low_T + last), BLOCK_K) * BLOCK_K, c)
    return a, b, c, last + 1


@triton.jit
def _forward_walk(
    acc, total, peak, q, k_base, v_base, stride_k, stride_v, start, stop, t, low, num_tokens, scale_log2, cap_scale,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    for s_first in range(start, stop, BLOCK_K):
        k = _rows(k_base, s_first, stride_k, num_tokens, D, BLOCK_D, BLOCK_K, MASKED)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            x = _tanh(x * cap_scale)
        if MASKED:
            s = s_first + tl.arange(0, BLOCK_K)
            x = tl.where((s[None, :] <= t[:, None]) & (s[None, :] >= low[:, None]), x, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(x, 1) * scale_log2)
        safe_peak = new_peak
        if MASKED:  # a row that has seen nothing yet: Inf - Inf would be a NaN
            safe_peak = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = tl.exp2(x * scale_log2 - safe_peak[:, None])
        shrink = tl.exp2(peak - safe_peak)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = _rows(v_base, s_first, stride_v, num_tokens, E, BLOCK_E, BLOCK_K, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def forward_kernel(
    q, k, v, out, lse, sinks, low_T, num_tokens, scale_log2, cap_scale,
    stride_qh, stride_q, stride_kg, stride_k, stride_vg, stride_v, stride_oh, stride_o,
    R: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: out and lse. The longest walks (the last queries) start first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64)
    k_base = k + head // R * stride_kg
    v_base = v + head // R * stride_vg
    t = first + tl.arange(0, BLOCK_Q)
    low = tl.load(low_T + t, mask=t < num_tokens, other=num_tokens)
    q_tile = _rows(q + head * stride_qh, first, stride_q, num_tokens, D, BLOCK_D, BLOCK_Q, True)
    acc = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    if SINKS:  # a sink is a key without a value that every query sees first
        peak = tl.zeros([BLOCK_Q], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.zeros([BLOCK_Q], tl.float32) + 1.0
    else:
        peak = tl.zeros([BLOCK_Q], tl.float32) - float("inf")
        total = tl.zeros([BLOCK_Q], tl.float32)
    a, b, c, end = _key_ranges(low_T, first, num_tokens, BLOCK_Q, BLOCK_K)
    acc, total, peak = _forward_walk(
        acc, total, peak, q_tile, k_base, v_base, stride_k, stride_v, a, b, t, low, num_tokens, scale_log2, cap_scale,
        SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc, total, peak = _forward_walk(
        acc, total, peak, q_tile, k_base, v_base, stride_k, stride_v, b, c, t, low, num_tokens, scale_log2, cap_scale,
        SOFTCAP, False, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc, total, peak = _forward_walk(
        acc, total, peak, q_tile, k_base, v_base, stride_k, stride_v, c, end, t, low, num_tokens, scale_log2, cap_scale,
        SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc = acc / total[:, None]
    _store_rows(out + head * stride_oh, first, stride_o, num_tokens, acc, E, BLOCK_E, BLOCK_Q)
    tl.store(lse + head * num_tokens + t, (peak + tl.log2(total)) * LN_2, mask=t < num_tokens)


@triton.jit
def delta_kernel(
    out, dout, delta, num_tokens, stride_oh, stride_o, stride_doh, stride_do,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta[h, t] = sum(dout * out) in fp32."""
    first = tl.program_id(0) * BLOCK
    head = tl.program_id(1).to(tl.int64)
    t = first + tl.arange(0, BLOCK)
    o = _rows(out + head * stride_oh, first, stride_o, num_tokens, E, BLOCK_E, BLOCK, True).to(tl.float32)
    do = _rows(dout + head * stride_doh, first, stride_do, num_tokens, E, BLOCK_E, BLOCK, True).to(tl.float32)
    tl.store(delta + head * num_tokens + t, tl.sum(o * do, 1), mask=t < num_tokens)


@triton.jit
def _dq_walk(
    dq, q, do, lse_log2, delta, k_base, v_base, stride_k, stride_v, start, stop, t, low, num_tokens,
    scale_log2, cap_scale,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    for s_first in range(start, stop, BLOCK_K):
        k = _rows(k_base, s_first, stride_k, num_tokens, D, BLOCK_D, BLOCK_K, MASKED)
        v = _rows(v_base, s_first, stride_v, num_tokens, E, BLOCK_E, BLOCK_K, MASKED)
        x = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP:
            x = _tanh(x * cap_scale)
        p = tl.exp2(x * scale_log2 - lse_log2[:, None])
        if MASKED:
            s = s_first + tl.arange(0, BLOCK_K)
            p = tl.where((s[None, :] <= t[:, None]) & (s[None, :] >= low[:, None]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - x * x)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    q, k, v, dout, lse, delta, dq, low_T, num_tokens, scale, scale_log2, cap_scale,
    stride_qh, stride_q, stride_kg, stride_k, stride_vg, stride_v, stride_doh, stride_do, stride_dqh, stride_dq,
    R: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: dq."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head = tl.program_id(1).to(tl.int64)
    k_base = k + head // R * stride_kg
    v_base = v + head // R * stride_vg
    t = first + tl.arange(0, BLOCK_Q)
    low = tl.load(low_T + t, mask=t < num_tokens, other=num_tokens)
    q_tile = _rows(q + head * stride_qh, first, stride_q, num_tokens, D, BLOCK_D, BLOCK_Q, True)
    do_tile = _rows(dout + head * stride_doh, first, stride_do, num_tokens, E, BLOCK_E, BLOCK_Q, True)
    lse_log2 = tl.load(lse + head * num_tokens + t, mask=t < num_tokens, other=0.0) * LOG2_E
    delta_tile = tl.load(delta + head * num_tokens + t, mask=t < num_tokens, other=0.0)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    a, b, c, end = _key_ranges(low_T, first, num_tokens, BLOCK_Q, BLOCK_K)
    acc = _dq_walk(
        acc, q_tile, do_tile, lse_log2, delta_tile, k_base, v_base, stride_k, stride_v, a, b, t, low, num_tokens,
        scale_log2, cap_scale, SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc = _dq_walk(
        acc, q_tile, do_tile, lse_log2, delta_tile, k_base, v_base, stride_k, stride_v, b, c, t, low, num_tokens,
        scale_log2, cap_scale, SOFTCAP, False, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc = _dq_walk(
        acc, q_tile, do_tile, lse_log2, delta_tile, k_base, v_base, stride_k, stride_v, c, end, t, low, num_tokens,
        scale_log2, cap_scale, SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    _store_rows(dq + head * stride_dqh, first, stride_dq, num_tokens, acc * scale, D, BLOCK_D, BLOCK_Q)


@triton.jit
def _dkdv_walk(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, stride_q, stride_do, start, stop, s, high, num_tokens,
    scale_log2, cap_scale,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Transposed: rows are keys, columns are queries, so that p and ds enter their products as they are."""
    for t_first in range(start, stop, BLOCK_Q):
        t = t_first + tl.arange(0, BLOCK_Q)
        q = _rows(q_base, t_first, stride_q, num_tokens, D, BLOCK_D, BLOCK_Q, MASKED)
        if MASKED:
            lse = tl.load(lse_base + t, mask=t < num_tokens, other=0.0)
        else:
            lse = tl.load(lse_base + t)
        x = tl.dot(k, tl.trans(q), input_precision="ieee")
        if SOFTCAP:
            x = _tanh(x * cap_scale)
        p = tl.exp2(x * scale_log2 - (lse * LOG2_E)[None, :])
        if MASKED:
            p = tl.where((t[None, :] >= s[:, None]) & (t[None, :] < high[:, None]), p, 0.0)
        do = _rows(do_base, t_first, stride_do, num_tokens, E, BLOCK_E, BLOCK_Q, MASKED)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        if MASKED:
            delta = tl.load(delta_base + t, mask=t < num_tokens, other=0.0)
        else:
            delta = tl.load(delta_base + t)
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - x * x)
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def dkdv_kernel(
    q, k, v, dout, lse, delta, dk, dv, high_T, num_tokens, scale, scale_log2, cap_scale,
    stride_qh, stride_q, stride_kg, stride_k, stride_vg, stride_v, stride_doh, stride_do,
    stride_dkg, stride_dk, stride_dvg, stride_dv,
    R: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of keys of one key/value head: dk and dv, summed over its query heads in order."""
    tl.static_assert(BLOCK_K % BLOCK_Q == 0)
    first = tl.program_id(0) * BLOCK_K
    group = tl.program_id(1).to(tl.int64)
    s = first + tl.arange(0, BLOCK_K)
    high = tl.load(high_T + s, mask=s < num_tokens, other=0)
    k_tile = _rows(k + group * stride_kg, first, stride_k, num_tokens, D, BLOCK_D, BLOCK_K, True)
    v_tile = _rows(v + group * stride_vg, first, stride_v, num_tokens, E, BLOCK_E, BLOCK_K, True)
    dk_tile = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, BLOCK_E], tl.float32)
    end = tl.load(high_T + tl.minimum(first + BLOCK_K, num_tokens) - 1)
    b = first + BLOCK_K  # masked [first, b), full [b, c), masked [c, end)
    c = tl.maximum(tl.load(high_T + first) // BLOCK_Q * BLOCK_Q, b)
    for member in range(R):
        head = group * R + member
        q_base = q + head * stride_qh
        do_base = dout + head * stride_doh
        lse_base = lse + head * num_tokens
        delta_base = delta + head * num_tokens
        dk_tile, dv_tile = _dkdv_walk(
            dk_tile, dv_tile, k_tile, v_tile, q_base, do_base, lse_base, delta_base, stride_q, stride_do,
            first, tl.minimum(b, end), s, high, num_tokens, scale_log2, cap_scale,
            SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_Q,
        )  # fmt: skip
        dk_tile, dv_tile = _dkdv_walk(
            dk_tile, dv_tile, k_tile, v_tile, q_base, do_base, lse_base, delta_base, stride_q, stride_do,
            b, c, s, high, num_tokens, scale_log2, cap_scale,
            SOFTCAP, False, D, E, BLOCK_D, BLOCK_E, BLOCK_Q,
        )  # fmt: skip
        dk_tile, dv_tile = _dkdv_walk(
            dk_tile, dv_tile, k_tile, v_tile, q_base, do_base, lse_base, delta_base, stride_q, stride_do,
            c, end, s, high, num_tokens, scale_log2, cap_scale,
            SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_Q,
        )  # fmt: skip
    _store_rows(dk + group * stride_dkg, first, stride_dk, num_tokens, dk_tile * scale, D, BLOCK_D, BLOCK_K)
    _store_rows(dv + group * stride_dvg, first, stride_dv, num_tokens, dv_tile, E, BLOCK_E, BLOCK_K)

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
BLOCK_STATS = 32


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
    source, head, first, stride_h, stride, num_tokens, TMA: tl.constexpr, CHECK: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + BLOCK) of one head; zeros beyond SIZE columns and, where CHECK, beyond num_tokens rows.

    `source` is a pointer or, where TMA, a descriptor of (heads, T, SIZE); strides are the pointer's, in elements.
    """
    if TMA:
        tile = source.load([head, first, 0]).reshape(BLOCK, BLOCK_SIZE)
    else:
        row = tl.arange(0, BLOCK)[:, None]
        column = tl.arange(0, BLOCK_SIZE)[None, :]
        at = source + tl.cast(head, tl.int64) * stride_h + tl.cast(first, tl.int64) * stride + row * stride + column
        if CHECK:
            tile = tl.load(at, mask=(first + row < num_tokens) & (column < SIZE), other=0.0)
        elif SIZE == BLOCK_SIZE:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=column < SIZE, other=0.0)
    return tile


@triton.jit
def _stats(source, head, first, stride, num_tokens, TMA: tl.constexpr, CHECK: tl.constexpr, BLOCK: tl.constexpr):
    """Numbers [first, first + BLOCK) of one head's row; zeros beyond num_tokens where CHECK."""
    if TMA:
        tile = source.load([head, first]).reshape(BLOCK)
    else:
        at = first + tl.arange(0, BLOCK)
        if CHECK:
            tile = tl.load(source + tl.cast(head, tl.int64) * stride + at, mask=at < num_tokens, other=0.0)
        else:
            tile = tl.load(source + tl.cast(head, tl.int64) * stride + at)
    return tile


@triton.jit
def _store_rows(
    target, head, first, stride_h, stride, num_tokens, value,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK_SIZE)[None, :]
    at = target + tl.cast(head, tl.int64) * stride_h + tl.cast(first, tl.int64) * stride + row * stride + column
    tl.store(at, value.to(target.dtype.element_ty), mask=(first + row < num_tokens) & (column < SIZE))


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
    acc, total, peak, q, k, v, group, stride_kg, stride_k, stride_vg, stride_v, start, stop, t, low,
    num_tokens, scale_log2, cap_scale,
    TMA: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    for s_first in range(start, stop, BLOCK_K):
        k_tile = _rows(k, group, s_first, stride_kg, stride_k, num_tokens, TMA, MASKED, D, BLOCK_D, BLOCK_K)
        x = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
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
        v_tile = _rows(v, group, s_first, stride_vg, stride_v, num_tokens, TMA, MASKED, E, BLOCK_E, BLOCK_K)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        peak = new_peak
    return acc, total, peak


@triton.jit
def forward_kernel(
    q, k, v, out, lse, sinks, low_T, num_tokens, scale_log2, cap_scale,
    stride_qh, stride_q, stride_kg, stride_k, stride_vg, stride_v, stride_oh, stride_o,
    TMA: tl.constexpr, R: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: out and lse. The longest walks (the last queries) start first."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head = tl.program_id(1)
    group = head // R
    t = first + tl.arange(0, BLOCK_Q)
    low = tl.load(low_T + t, mask=t < num_tokens, other=num_tokens)
    q_tile = _rows(q, head, first, stride_qh, stride_q, num_tokens, TMA, True, D, BLOCK_D, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, BLOCK_E], tl.float32)
    if SINKS:  # a sink is a key without a value that every query sees first
        peak = tl.zeros([BLOCK_Q], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total = tl.zeros([BLOCK_Q], tl.float32) + 1.0
    else:
        peak = tl.zeros([BLOCK_Q], tl.float32) - float("inf")
        total = tl.zeros([BLOCK_Q], tl.float32)
    a, b, c, end = _key_ranges(low_T, first, num_tokens, BLOCK_Q, BLOCK_K)
    acc, total, peak = _forward_walk(
        acc, total, peak, q_tile, k, v, group, stride_kg, stride_k, stride_vg, stride_v, a, b, t, low,
        num_tokens, scale_log2, cap_scale,
        TMA, SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc, total, peak = _forward_walk(
        acc, total, peak, q_tile, k, v, group, stride_kg, stride_k, stride_vg, stride_v, b, c, t, low,
        num_tokens, scale_log2, cap_scale,
        TMA, SOFTCAP, False, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc, total, peak = _forward_walk(
        acc, total, peak, q_tile, k, v, group, stride_kg, stride_k, stride_vg, stride_v, c, end, t, low,
        num_tokens, scale_log2, cap_scale,
        TMA, SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc = acc / total[:, None]
    _store_rows(out, head, first, stride_oh, stride_o, num_tokens, acc, E, BLOCK_E, BLOCK_Q)
    tl.store(lse + head.to(tl.int64) * num_tokens + t, (peak + tl.log2(total)) * LN_2, mask=t < num_tokens)


@triton.jit
def stats_kernel(
    out, dout, lse, lse_log2, delta, num_tokens, stride_oh, stride_o, stride_doh, stride_do, stride_stats,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What both passes of the backward need of a query: lse in log2 units, and delta = sum(dout * out)."""
    first = tl.program_id(0) * BLOCK
    head = tl.program_id(1)
    t = first + tl.arange(0, BLOCK)
    o = _rows(out, head, first, stride_oh, stride_o, num_tokens, False, True, E, BLOCK_E, BLOCK)
    do = _rows(dout, head, first, stride_doh, stride_do, num_tokens, False, True, E, BLOCK_E, BLOCK)
    product = o.to(tl.float32) * do.to(tl.float32)
    to = head.to(tl.int64) * stride_stats + t
    tl.store(delta + to, tl.sum(product, 1), mask=t < num_tokens)
    value = tl.load(lse + head.to(tl.int64) * num_tokens + t, mask=t < num_tokens, other=0.0)
    tl.store(lse_log2 + to, value * LOG2_E, mask=t < num_tokens)


@triton.jit
def _dq_walk(
    dq, q, do, lse_log2, delta, k, v, group, stride_kg, stride_k, stride_vg, stride_v, start, stop, t, low,
    num_tokens, scale_log2, cap_scale,
    TMA: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    for s_first in range(start, stop, BLOCK_K):
        k_tile = _rows(k, group, s_first, stride_kg, stride_k, num_tokens, TMA, MASKED, D, BLOCK_D, BLOCK_K)
        v_tile = _rows(v, group, s_first, stride_vg, stride_v, num_tokens, TMA, MASKED, E, BLOCK_E, BLOCK_K)
        x = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
        if SOFTCAP:
            x = _tanh(x * cap_scale)
        p = tl.exp2(x * scale_log2 - lse_log2[:, None])
        if MASKED:
            s = s_first + tl.arange(0, BLOCK_K)
            p = tl.where((s[None, :] <= t[:, None]) & (s[None, :] >= low[:, None]), p, 0.0)
        dp = tl.dot(do, tl.trans(v_tile), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - x * x)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    q, k, v, dout, lse_log2, delta, dq, low_T, num_tokens, scale, scale_log2, cap_scale,
    stride_qh, stride_q, stride_kg, stride_k, stride_vg, stride_v, stride_doh, stride_do, stride_dqh, stride_dq,
    stride_stats,
    TMA: tl.constexpr, R: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: dq."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q
    head = tl.program_id(1)
    group = head // R
    t = first + tl.arange(0, BLOCK_Q)
    low = tl.load(low_T + t, mask=t < num_tokens, other=num_tokens)
    q_tile = _rows(q, head, first, stride_qh, stride_q, num_tokens, TMA, True, D, BLOCK_D, BLOCK_Q)
    do_tile = _rows(dout, head, first, stride_doh, stride_do, num_tokens, TMA, True, E, BLOCK_E, BLOCK_Q)
    lse_tile = _stats(lse_log2, head, first, stride_stats, num_tokens, False, True, BLOCK_Q)
    delta_tile = _stats(delta, head, first, stride_stats, num_tokens, False, True, BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    a, b, c, end = _key_ranges(low_T, first, num_tokens, BLOCK_Q, BLOCK_K)
    acc = _dq_walk(
        acc, q_tile, do_tile, lse_tile, delta_tile, k, v, group, stride_kg, stride_k, stride_vg, stride_v, a, b,
        t, low, num_tokens, scale_log2, cap_scale, TMA, SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc = _dq_walk(
        acc, q_tile, do_tile, lse_tile, delta_tile, k, v, group, stride_kg, stride_k, stride_vg, stride_v, b, c,
        t, low, num_tokens, scale_log2, cap_scale, TMA, SOFTCAP, False, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    acc = _dq_walk(
        acc, q_tile, do_tile, lse_tile, delta_tile, k, v, group, stride_kg, stride_k, stride_vg, stride_v, c, end,
        t, low, num_tokens, scale_log2, cap_scale, TMA, SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_K,
    )  # fmt: skip
    _store_rows(dq, head, first, stride_dqh, stride_dq, num_tokens, acc * scale, D, BLOCK_D, BLOCK_Q)


@triton.jit
def _dkdv_walk(
    dk, dv, k, v, q, dout, lse_log2, delta, head, stride_qh, stride_q, stride_doh, stride_do, stride_stats, start, stop,
    s, high, num_tokens, scale_log2, cap_scale,
    TMA: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Transposed: rows are keys, columns are queries, so that p and ds enter their products as they are."""
    for t_first in range(start, stop, BLOCK_Q):
        t = t_first + tl.arange(0, BLOCK_Q)
        q_tile = _rows(q, head, t_first, stride_qh, stride_q, num_tokens, TMA, MASKED, D, BLOCK_D, BLOCK_Q)
        lse_tile = _stats(lse_log2, head, t_first, stride_stats, num_tokens, TMA, MASKED, BLOCK_Q)
        x = tl.dot(k, tl.trans(q_tile), input_precision="ieee")
        if SOFTCAP:
            x = _tanh(x * cap_scale)
        p = tl.exp2(x * scale_log2 - lse_tile[None, :])
        if MASKED:
            p = tl.where((t[None, :] >= s[:, None]) & (t[None, :] < high[:, None]), p, 0.0)
        do_tile = _rows(dout, head, t_first, stride_doh, stride_do, num_tokens, TMA, MASKED, E, BLOCK_E, BLOCK_Q)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do_tile), input_precision="ieee")
        delta_tile = _stats(delta, head, t_first, stride_stats, num_tokens, TMA, MASKED, BLOCK_Q)
        ds = p * (dp - delta_tile[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - x * x)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def dkdv_kernel(
    q, k, v, dout, lse_log2, delta, dk, dv, high_T, num_tokens, scale, scale_log2, cap_scale,
    stride_qh, stride_q, stride_kg, stride_k, stride_vg, stride_v, stride_doh, stride_do,
    stride_dkg, stride_dk, stride_dvg, stride_dv, stride_stats,
    TMA: tl.constexpr, R: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of keys of one key/value head: dk and dv, summed over its query heads in order."""
    tl.static_assert(BLOCK_K % BLOCK_Q == 0)
    first = tl.program_id(0) * BLOCK_K
    group = tl.program_id(1)
    s = first + tl.arange(0, BLOCK_K)
    high = tl.load(high_T + s, mask=s < num_tokens, other=0)
    k_tile = _rows(k, group, first, stride_kg, stride_k, num_tokens, TMA, True, D, BLOCK_D, BLOCK_K)
    v_tile = _rows(v, group, first, stride_vg, stride_v, num_tokens, TMA, True, E, BLOCK_E, BLOCK_K)
    dk_tile = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, BLOCK_E], tl.float32)
    end = tl.load(high_T + tl.minimum(first + BLOCK_K, num_tokens) - 1)
    b = first + BLOCK_K  # masked [first, b), full [b, c), masked [c, end)
    c = tl.maximum(tl.load(high_T + first) // BLOCK_Q * BLOCK_Q, b)
    for member in range(R):
        head = group * R + member
        dk_tile, dv_tile = _dkdv_walk(
            dk_tile, dv_tile, k_tile, v_tile, q, dout, lse_log2, delta, head,
            stride_qh, stride_q, stride_doh, stride_do, stride_stats, first, tl.minimum(b, end),
            s, high, num_tokens, scale_log2, cap_scale,
            TMA, SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_Q,
        )  # fmt: skip
        dk_tile, dv_tile = _dkdv_walk(
            dk_tile, dv_tile, k_tile, v_tile, q, dout, lse_log2, delta, head,
            stride_qh, stride_q, stride_doh, stride_do, stride_stats, b, c,
            s, high, num_tokens, scale_log2, cap_scale,
            TMA, SOFTCAP, False, D, E, BLOCK_D, BLOCK_E, BLOCK_Q,
        )  # fmt: skip
        dk_tile, dv_tile = _dkdv_walk(
            dk_tile, dv_tile, k_tile, v_tile, q, dout, lse_log2, delta, head,
            stride_qh, stride_q, stride_doh, stride_do, stride_stats, c, end,
            s, high, num_tokens, scale_log2, cap_scale,
            TMA, SOFTCAP, True, D, E, BLOCK_D, BLOCK_E, BLOCK_Q,
        )  # fmt: skip
    _store_rows(dk, group, first, stride_dkg, stride_dk, num_tokens, dk_tile * scale, D, BLOCK_D, BLOCK_K)
    _store_rows(dv, group, first, stride_dvg, stride_dv, num_tokens, dv_tile, E, BLOCK_E, BLOCK_K)

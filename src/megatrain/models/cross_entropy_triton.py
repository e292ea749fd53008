"""Triton kernels of the cross-entropy: one program a row, columns in order. Launched by cross_entropy.py."""

from __future__ import annotations

import triton
import triton.language as tl

LAUNCH = {"BLOCK": 4096, "num_warps": 8}

# Below every finite fp32, and finite: a first block of -inf logits must not give -inf - -inf.
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def forward_kernel(
    logits, labels, loss, row_max, row_log_sum, row_stride, num_columns, smoothing,
    SMOOTH: tl.constexpr, IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """loss = (max - x[label]) + log sum exp(x - max), its smoothed form if SMOOTH; keeps max and log sum apart."""
    row = tl.program_id(0).to(tl.int64)
    x_row = logits + row * row_stride
    peak = _LOWEST
    total = 0.0
    sum_x = 0.0
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + at, mask=at < num_columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
        if SMOOTH:
            sum_x += tl.sum(tl.where(at < num_columns, x, 0.0), 0)
    log_sum = tl.log(total)
    tl.store(row_max + row, peak)
    tl.store(row_log_sum + row, log_sum)
    label = tl.load(labels + row)
    if label == IGNORED:
        tl.store(loss + row, 0.0)
    elif (label < 0) | (label >= num_columns):
        tl.store(loss + row, float("nan"))  # no token of this vocabulary: the step must not count
    else:
        out = (peak - tl.load(x_row + label).to(tl.float32)) + log_sum
        if SMOOTH:
            out = (1.0 - smoothing) * out + smoothing * ((peak - sum_x / num_columns) + log_sum)
        tl.store(loss + row, out)


@triton.jit
def backward_kernel(
    dloss, logits, labels, row_max, row_log_sum, row_stride, num_columns, smoothing,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """logits <- dloss * (softmax - (1 - s) * onehot - s / V); zeros where there is no label."""
    row = tl.program_id(0).to(tl.int64)
    x_row = logits + row * row_stride
    label = tl.load(labels + row)
    peak = tl.load(row_max + row)
    log_sum = tl.load(row_log_sum + row)
    scale = tl.where(label == IGNORED, 0.0, tl.load(dloss + row))
    everywhere = smoothing / num_columns
    for start in range(0, num_columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_row + at, mask=at < num_columns, other=-float("inf")).to(tl.float32)
        p = tl.exp((x - peak) - log_sum) - everywhere - tl.where(at == label, 1.0 - smoothing, 0.0)
        # a row without a label gives zeros even if its logits are not finite
        d = tl.where(label == IGNORED, 0.0, scale * p)
        tl.store(x_row + at, d.to(logits.dtype.element_ty), mask=at < num_columns)

"""The global gradient norm, in fp64 over a fixed tree, and the clip coefficient it gives.

The order of the sum inside a tensor is stated by `spec.tensor_sum_squares`; tensors are added one after another in
checkpoint-name order. Nothing about threads, placement or how segments are cut can change a bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatrain.optim import native, spec
from megatrain.optim.spec import F32


def tensor_sum_squares(grad: F32, threads: int = 1, *, isa: str | None = None) -> float:
    """Sum of squares of one tensor (its own shape: dimension 0 cuts it into leaves), the bits of the specification."""
    if grad.dtype != np.float32:
        raise ValueError(f"the gradient is {grad.dtype}; it must be float32")
    if not grad.flags.c_contiguous or not grad.flags.aligned:
        raise ValueError(f"the gradient has strides {grad.strides} bytes; it must be contiguous and aligned")
    if threads < 1:
        raise ValueError(f"threads is {threads}; give at least 1")
    chosen = native.choose(isa)
    if chosen is None:
        return spec.tensor_sum_squares(grad)
    num_leaves = grad.shape[0] if grad.ndim else 1
    return chosen.module.tensor_sum_squares(grad.reshape(-1), num_leaves, threads, chosen.isa)


def total_norm(sums: Sequence[float]) -> float:
    """The norm of all tensors from their sums of squares, given in checkpoint-name order."""
    total = 0.0
    for value in sums:
        total += value
    return math.sqrt(total)


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What every gradient is multiplied by: min(1, max_norm / norm), rounded to fp32; 1 if `max_norm` is None.

    A non-finite norm is refused: that step applies nothing, so there is nothing to clip.
    """
    if not (math.isfinite(norm) and norm >= 0.0):
        raise ValueError(f"the gradient norm is {norm}; a non-finite step must be skipped, not clipped")
    if max_norm is None:
        return 1.0
    if not max_norm > 0.0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0, or None for no clipping")
    return 1.0 if norm <= max_norm else spec.fp32(max_norm / norm)

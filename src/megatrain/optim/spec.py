"""The specification of one optimizer step: plain numpy, each operation rounded on its own. Every fast form equals it.

Fast forms (C++ in csrc/, Triton in kernels/) must give the same bits for every input. Two NaNs count as equal: which
payload survives an addition differs between processors, and a step that produces one is never applied (contract A11).

AdamW, per element, all operands and results fp32, round to nearest even, denormals kept, no fused multiply-add:

    g  = grad * coefficient                      clipping
    m' = m + (g - m) * lerp                      lerp  = 1 - beta1
    v' = v * beta2 + (g * square) * g            square = 1 - beta2
    d  = sqrt(v') / bias2_sqrt + epsilon         bias2_sqrt = sqrt(1 - beta2^t)
    w' = w * decay_mul - (m' * step_size) / d    step_size = lr / (1 - beta1^t), decay_mul = 1 - lr * weight_decay

A running average of the masters, if one is kept, follows each update; its decay is one number for the whole run:

    e' = e + (w' - e) * share                    share = 1 - decay

The order of the operations is that of `torch.optim.AdamW`, so that the two agree to the last few bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U16 = NDArray[np.uint16]
I16 = NDArray[np.int16]

NUM_LANES = 256


@dataclass(frozen=True)
class AdamW:
    """The hyper-parameters of one step; the learning rate is the scheduled one."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name, value, ok, want in (
            ("learning_rate", self.learning_rate, self.learning_rate >= 0.0, ">= 0"),
            ("beta1", self.beta1, 0.0 <= self.beta1 < 1.0, "in [0, 1)"),
            ("beta2", self.beta2, 0.0 <= self.beta2 < 1.0, "in [0, 1)"),
            ("epsilon", self.epsilon, self.epsilon >= 0.0, ">= 0"),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0.0, ">= 0"),
        ):
            if not (ok and math.isfinite(value)):
                raise ValueError(f"AdamW {name} is {value}; it must be finite and {want}")


class Scalars(NamedTuple):
    """The constants of one step, each computed in fp64 and rounded to fp32 once (held as floats, exactly)."""

    coefficient: float
    lerp: float
    beta2: float
    square: float
    step_size: float
    bias2_sqrt: float
    epsilon: float
    decay_mul: float


def fp32(value: float) -> float:
    """`value` rounded to the nearest fp32 number."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def scalars(hyper: AdamW, step: int, clip_coefficient: float) -> Scalars:
    """The constants of update number `step`: a 1-based count of the updates applied, skipped steps not among them."""
    if step < 1:
        raise ValueError(f"step is {step}; it counts applied updates from 1")
    if not (math.isfinite(clip_coefficient) and clip_coefficient >= 0.0):
        raise ValueError(f"clip coefficient is {clip_coefficient}; a non-finite step must be skipped, not applied")
    return Scalars(
        coefficient=fp32(clip_coefficient),
        lerp=fp32(1.0 - hyper.beta1),
        beta2=fp32(hyper.beta2),
        square=fp32(1.0 - hyper.beta2),
        step_size=fp32(hyper.learning_rate / (1.0 - hyper.beta1**step)),
        bias2_sqrt=fp32(math.sqrt(1.0 - hyper.beta2**step)),
        epsilon=fp32(hyper.epsilon),
        decay_mul=fp32(1.0 - hyper.learning_rate * hyper.weight_decay),
    )


def adamw(w: F32, m: F32, v: F32, grad: F32, s: Scalars, *, decay: bool) -> tuple[F32, F32, F32]:
    """New (w, m, v); the arguments are not touched."""
    c, lerp, beta2, square, step_size, bias2_sqrt, epsilon, decay_mul = np.array(s, np.float32)
    with np.errstate(all="ignore"):
        g = grad * c
        m = m + (g - m) * lerp
        v = v * beta2 + (g * square) * g
        d = np.sqrt(v) / bias2_sqrt + epsilon
        w = (w * decay_mul if decay else w) - (m * step_size) / d
    return w, m, v


def average_share(decay: float) -> float:
    """The share of a new master in its average; computed in fp64, rounded to fp32 once."""
    if not 0.0 < decay < 1.0:
        raise ValueError(f"the decay of the average is {decay}; it must be above 0 and below 1")
    return fp32(1.0 - decay)


def average(ema: F32, w: F32, share: float) -> F32:
    """The average after an update that gave the masters `w`; the arguments are not touched."""
    with np.errstate(all="ignore"):
        return ema + np.multiply(w - ema, np.float32(share))


def adamw_split(hi: U16, lo: I16, m: F32, v: F32, grad: F32, s: Scalars, *, decay: bool) -> tuple[U16, I16, F32, F32]:
    """New (hi, lo, m, v): the master is joined, updated in fp32 and split again."""
    w, m, v = adamw(join(hi, lo), m, v, grad, s, decay=decay)
    return *split(w), m, v


def split(master: F32) -> tuple[U16, I16]:
    """fp32 master -> (hi, lo); hi holds the bits of a bf16: nearest, ties away from zero.

    A NaN has a NaN hi (quieted: rounding its bits could carry into Inf or the sign). lo is bits(master) - (hi << 16)
    modulo 2^16, which is the lower half of the bits; the largest finite values round to an Inf hi and a negative lo.
    """
    bits = master.view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded = (bits + np.uint32(0x8000)) >> np.uint32(16)  # wraps for NaNs only
    hi = np.where(is_nan, (bits >> np.uint32(16)) | np.uint32(0x0040), rounded).astype(np.uint16)
    return hi, bits.astype(np.uint16).view(np.int16)


def join(hi: U16, lo: I16) -> F32:
    """(hi, lo) -> the fp32 master they were split from, bit for bit; a NaN stays a NaN."""
    bits = (hi.astype(np.uint32) << np.uint32(16)) + lo.astype(np.int32).view(np.uint32)
    return bits.view(np.float32)


def reduce_lanes(values: F64) -> F64:
    """Sum each row of `values` (rows, n) in the fixed order: 256 lanes, then halving. -> (rows,)

    Lane j adds elements j, j + 256, j + 512, ... in that order, starting from zero; a missing element adds nothing.
    Then the upper half of the lanes is added to the lower half until one is left: x[:128] + x[128:], x[:64] + x[64:]
    and so on.
    """
    num_rows, count = values.shape
    lanes = np.zeros((num_rows, NUM_LANES))
    for start in range(0, count, NUM_LANES):
        piece = values[:, start : start + NUM_LANES]
        lanes[:, : piece.shape[1]] += piece
    half = NUM_LANES // 2
    while half:
        lanes = lanes[:, :half] + lanes[:, half:]
        half //= 2
    return lanes[:, 0]


def tensor_sum_squares(grad: F32) -> float:
    """The sum of squares of one tensor in fp64, in an order that no thread count, placement or split can change.

    A leaf is one slice of dimension 0 (every element of a 1-D tensor; the whole of a 0-D one). A leaf's value is its
    squares, exact in fp64, summed by `reduce_lanes`; the tensor's sum is the leaf values summed by `reduce_lanes`.
    An empty tensor gives 0. Source: ours.
    """
    leaves = grad.reshape(grad.shape[0] if grad.ndim and grad.size else 1, -1)
    values = np.empty(leaves.shape[0])
    with np.errstate(all="ignore"):
        for start in range(0, leaves.shape[0], 1024):  # bounds the fp64 copy, changes no order
            squares = leaves[start : start + 1024].astype(np.float64) ** 2
            values[start : start + 1024] = reduce_lanes(squares)
        return float(reduce_lanes(values[None])[0])

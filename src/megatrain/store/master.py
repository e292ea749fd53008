"""The master rule on tensors: an fp32 master as bf16 `hi` and int16 `lo`. For load and save; updates have their own.

    hi = bf16 whose bits are (bits(master) + 0x8000) >> 16        nearest, ties away from zero
    lo = bits(master) - (bits(hi) << 16)                           in [-0x8000, 0x7fff]
    master = bits^-1((bits(hi) << 16) + lo)                        exact for every master that is not NaN
A NaN master keeps its sign and upper payload, made quiet, in hi, and lo = 0: rounding could carry it into Inf or -0.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """(hi bf16, lo int16) of an fp32 tensor."""
    bits = master.contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16  # wraps for NaN patterns only, which are replaced below
    lower = bits - (upper << 16)
    nan = (bits & _MAGNITUDE) > _EXPONENT
    upper = torch.where(nan, (bits >> 16) | 0x40, upper)
    lower = lower.masked_fill_(nan, 0)
    return upper.to(torch.int16).view(torch.bfloat16), lower.to(torch.int16)


def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """The exact fp32 master of (hi bf16, lo int16)."""
    return ((hi.contiguous().view(torch.int16).to(torch.int32) << 16) + lo.to(torch.int32)).view(torch.float32)

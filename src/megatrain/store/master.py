"""The master rule of optim/spec.py (`split`, `join`) on tensors, an fp32 master as bf16 `hi` and int16 `lo`: its bits.

For load and save; updates have their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """(hi bf16, lo int16) of an fp32 tensor."""
    bits = master.contiguous().view(torch.int32)
    nan = (bits & _MAGNITUDE) > _EXPONENT
    upper = torch.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    return upper.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join_master(hi: Tensor, lo: Tensor) -> Tensor:
    """The exact fp32 master of (hi bf16, lo int16)."""
    return ((hi.contiguous().view(torch.int16).to(torch.int32) << 16) + lo.to(torch.int32)).view(torch.float32)

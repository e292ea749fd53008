"""NEFTune (arXiv 2310.05914): noise on what enters the first layer, in training only.

    h[t] += u * alpha / sqrt(L * D)       u uniform in [-1, 1), L tokens of t's document, D hidden size

u is a hash of (seed, step, micro-batch, element), in integers: the same bits on every device and placement, nothing to
save. The noise is rounded to h's dtype before it is added. Legend: T tokens of a micro-batch, C tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.models.batch import TokenBatch
from megatrain.models.dice import key_of

CHUNK_ELEMENTS = 1 << 21  # noise exists for so many elements at one time
_LOW_32 = 0xFFFFFFFF


def with_noise(h_1TD: Tensor, batch: TokenBatch, alpha: float, seed: int, step: int, micro_batch: int) -> Tensor:
    """`h_1TD` with the noise of one micro-batch of one step added; a new tensor."""
    hidden_size = h_1TD.shape[-1]
    ids_T = batch.document_ids_T
    lengths_T = torch.searchsorted(ids_T, ids_T, right=True) - torch.searchsorted(ids_T, ids_T)
    scale_T = (alpha / (lengths_T.double() * hidden_size).sqrt()).float()
    key = key_of(seed, step, micro_batch)
    out_1TD = h_1TD.clone()
    num_tokens = max(1, CHUNK_ELEMENTS // hidden_size)
    for start in range(0, ids_T.numel(), num_tokens):
        scale_C = scale_T[start : start + num_tokens]
        first, count = start * hidden_size, scale_C.numel() * hidden_size
        noise_CD = uniform(first, count, key, h_1TD.device).view(-1, hidden_size) * scale_C[:, None]
        out_1TD[0, start : start + num_tokens] += noise_CD.to(h_1TD.dtype)
    return out_1TD


def uniform(first: int, count: int, key: int, device: torch.device) -> Tensor:
    """fp32 numbers of [-1, 1), multiples of 2^-23: those of elements [first, first + count) under a 64-bit key."""
    bits = torch.arange(first, first + count, dtype=torch.int64, device=device)
    for half in (key & _LOW_32, key >> 32):
        bits = _hash32((bits + half) & _LOW_32)
    return (bits >> 8).float() * 2.0**-23 - 1.0


def _hash32(bits: Tensor) -> Tensor:
    """A 32-bit mixer (Wellons' lowbias32) on int64 words that hold 32 bits each."""
    bits = bits ^ (bits >> 16)
    bits = (bits * 0x7FEB352D) & _LOW_32
    bits = bits ^ (bits >> 15)
    bits = (bits * 0x846CA68B) & _LOW_32  # wraps in 64 bits; the low 32 are right
    return bits ^ (bits >> 16)

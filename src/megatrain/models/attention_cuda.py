"""Attention on CUDA: Triton kernels whose backward has no atomics, and cuDNN where bits need not repeat.

No host waits for the device: documents travel as ids, and the kernels find their bounds. Tile sizes are fixed per head
size and class of device, never tuned at run time: they decide in which order sums are taken, and so the bits.

Legend: 1 batch of one, H query heads, G key/value heads, T tokens, D head size of queries and keys, E of values.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatrain.models import attention_cpu, attention_triton


class Tiles(NamedTuple):
    """One kernel's launch: tokens of a block of queries and of keys, warps, stages of its software pipeline, and
    whether tiles travel by the bulk copy engine (TMA; devices before Hopper read them by pointers all the same)."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool = False


class TileSet(NamedTuple):
    """The launches of the three kernels that hold products."""

    forward: Tiles
    dkdv: Tiles
    dq: Tiles


# By the larger head size, rounded up to a power of two. Found with `python -m bench.attention --tune`.
_HOPPER_16BIT = {
    64: TileSet(Tiles(128, 128, 8, 3, True), Tiles(64, 128, 8, 3, True), Tiles(128, 64, 8, 3, True)),
    128: TileSet(Tiles(128, 128, 8, 3, True), Tiles(64, 128, 8, 3, True), Tiles(128, 64, 8, 3, True)),
    256: TileSet(Tiles(128, 64, 8, 2, True), Tiles(64, 64, 8, 1, True), Tiles(64, 64, 8, 2, True)),
}
# Fit into 99 KiB of shared memory: every device since Ampere has that much.
_ANY_16BIT = {
    64: TileSet(Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    128: TileSet(Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    256: TileSet(Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)),
}
_ANY_32BIT = {
    64: TileSet(Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1)),
    128: TileSet(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
    256: TileSet(Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
_LARGE_SHARED_BYTES = 220 * 1024


def tiles_for(q_1HTD: Tensor, v_1GTE: Tensor) -> TileSet:
    """The tiles of these head sizes on this device."""
    size = min(256, max(64, triton.next_power_of_2(max(q_1HTD.shape[3], v_1GTE.shape[3]))))
    if q_1HTD.element_size() > 2:
        return _ANY_32BIT[size]
    if q_1HTD.is_cuda:
        device = torch.cuda.get_device_properties(q_1HTD.device)
        if device.shared_memory_per_block_optin >= _LARGE_SHARED_BYTES:
            return _HOPPER_16BIT[size]
    return _ANY_16BIT[size]


def forward(
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, document_ids_T: Tensor, sinks_H: Tensor | None,
    scale: float, window: int, softcap: float, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (out_1THE, lse_1HT in fp32), the same bits in every run."""
    q_1HTD, k_1GTD, v_1GTE = (_aligned(x) for x in (q_1HTD, k_1GTD, v_1GTE))
    _, num_heads, num_tokens, _ = q_1HTD.shape
    out_1THE = q_1HTD.new_empty(1, num_tokens, num_heads, v_1GTE.shape[3])
    lse_1HT = q_1HTD.new_empty(1, num_heads, num_tokens, dtype=torch.float32)
    low_T, _ = _bounds(document_ids_T, num_tokens, window)
    t = tiles or tiles_for(q_1HTD, v_1GTE).forward
    launch, (q, k, v) = _launch(t, q_1HTD, k_1GTD, v_1GTE, softcap=softcap)
    with torch.cuda.device_of(q_1HTD):
        attention_triton.forward_kernel[(triton.cdiv(num_tokens, t.block_q), num_heads)](
            q, k, v, out_1THE, lse_1HT, sinks_H, low_T, num_tokens, *_log2_scales(scale, softcap),
            *_strides(q_1HTD, k_1GTD, v_1GTE, out_1THE.transpose(1, 2)), SINKS=sinks_H is not None, **launch,
        )  # fmt: skip
    return out_1THE, lse_1HT


def backward(
    dout_1THE: Tensor, q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, document_ids_T: Tensor, sinks_H: Tensor | None,
    out_1THE: Tensor, lse_1HT: Tensor, scale: float, window: int, softcap: float, tiles: TileSet | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (dq, dk, dv, dsinks) like `attention_cpu.backward`, the same bits in every run."""
    q_1HTD, k_1GTD, v_1GTE = (_aligned(x) for x in (q_1HTD, k_1GTD, v_1GTE))
    dout_1HTE = _aligned(dout_1THE.transpose(1, 2))
    _, num_heads, num_tokens, _ = q_1HTD.shape
    dq_1HTD, dk_1GTD, dv_1GTE = attention_cpu.empty_gradients(q_1HTD, k_1GTD, v_1GTE)
    low_T, high_T = _bounds(document_ids_T, num_tokens, window)
    chosen = tiles or tiles_for(q_1HTD, v_1GTE)
    with torch.cuda.device_of(q_1HTD):
        lse_log2_HT, delta_HT = stats = _stats(out_1THE.transpose(1, 2), dout_1HTE, lse_1HT)
        scales = (scale, *_log2_scales(scale, softcap))
        given = (q_1HTD, k_1GTD, v_1GTE, dout_1HTE)
        launch, sources = _launch(chosen.dkdv, *given, softcap=softcap)
        if launch["TMA"]:
            stats = tuple(_descriptor(x, 1, chosen.dkdv.block_q) for x in stats)
        attention_triton.dkdv_kernel[(triton.cdiv(num_tokens, chosen.dkdv.block_k), k_1GTD.shape[1])](
            *sources, *stats, dk_1GTD, dv_1GTE, high_T, num_tokens, *scales,
            *_strides(*given, dk_1GTD, dv_1GTE), delta_HT.stride(0), **launch,
        )  # fmt: skip
        launch, sources = _launch(chosen.dq, *given, softcap=softcap)
        attention_triton.dq_kernel[(triton.cdiv(num_tokens, chosen.dq.block_q), num_heads)](
            *sources, lse_log2_HT, delta_HT, dq_1HTD, low_T, num_tokens, *scales,
            *_strides(*given, dq_1HTD), delta_HT.stride(0), **launch,
        )  # fmt: skip
    dsinks_H = q_1HTD.new_empty(0) if sinks_H is None else attention_cpu.sink_gradient(sinks_H, lse_1HT, delta_HT[None])
    return dq_1HTD, dk_1GTD, dv_1GTE, dsinks_H


def forward_fast(
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, document_ids_T: Tensor, sinks_H: Tensor | None,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `forward`, by cuDNN for one document without window, soft-cap and sinks."""
    if not _suits_cudnn(q_1HTD, v_1GTE, document_ids_T, sinks_H, window, softcap):
        return forward(q_1HTD, k_1GTD, v_1GTE, document_ids_T, sinks_H, scale, window, softcap)
    out_1HTE, lse_1HT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_1HTD, k_1GTD, v_1GTE, None, True, 0.0, True, False, scale=scale
    )
    return out_1HTE.transpose(1, 2).contiguous(), lse_1HT1.reshape(1, *q_1HTD.shape[1:3])


def backward_fast(
    dout_1THE: Tensor, q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, document_ids_T: Tensor, sinks_H: Tensor | None,
    out_1THE: Tensor, lse_1HT: Tensor, scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `backward`, by cuDNN where `forward_fast` took cuDNN; its sums use atomics and differ from run to run."""
    if not _suits_cudnn(q_1HTD, v_1GTE, document_ids_T, sinks_H, window, softcap):
        return backward(
            dout_1THE, q_1HTD, k_1GTD, v_1GTE, document_ids_T, sinks_H, out_1THE, lse_1HT, scale, window, softcap
        )
    num_tokens, no_dropout = q_1HTD.shape[2], torch.zeros((), dtype=torch.int64, device=q_1HTD.device)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout_1THE.transpose(1, 2), q_1HTD, k_1GTD, v_1GTE, out_1THE.transpose(1, 2), lse_1HT.unsqueeze(3),
        no_dropout, no_dropout, None, None, None, num_tokens, num_tokens, 0.0, True, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients)
    return dq, dk, dv, q_1HTD.new_empty(0)


def _suits_cudnn(
    q_1HTD: Tensor, v_1GTE: Tensor, document_ids_T: Tensor, sinks_H: Tensor | None, window: int, softcap: float
) -> bool:
    plain = document_ids_T.numel() == 1 and sinks_H is None and not window and not softcap
    size = q_1HTD.shape[3]
    return plain and q_1HTD.element_size() == 2 and size == v_1GTE.shape[3] and size <= 128 and size % 8 == 0


def _aligned(x_1HTD: Tensor) -> Tensor:
    """x, or a copy of it, with rows of neighbours in memory that start at multiples of 16 bytes.

    Copies are for odd head sizes and slices. TMA wants it, and loads from other addresses gave wrong scores, other ones
    in every run: values sliced at byte 24 of heads of 28, 128 x 128 tiles, Triton 3.6 on an H200.
    """
    if x_1HTD.stride(3) == 1 and _suits_tma(x_1HTD):
        return x_1HTD
    multiple = 16 // x_1HTD.element_size()
    *outer, size = x_1HTD.shape
    return x_1HTD.new_empty(*outer, -(-size // multiple) * multiple)[..., :size].copy_(x_1HTD)


def _strides(*tensors_1HTD: Tensor) -> list[int]:
    """Head and token strides of each tensor, in elements."""
    return [x.stride(axis) for x in tensors_1HTD for axis in (1, 2)]


def _log2_scales(scale: float, softcap: float) -> tuple[float, float]:
    """(scale_log2, cap_scale) of the kernels."""
    assert scale > 0, f"scale {scale}: the running maximum needs a positive one"
    return (softcap or scale) * math.log2(math.e), scale / softcap if softcap else 0.0


def _launch(
    tiles: Tiles, q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, *dout_1HTE: Tensor, softcap: float
) -> tuple[dict[str, int | bool], list[Tensor | TensorDescriptor]]:
    """(keyword arguments of a kernel, its q, k, v and dout as pointers or descriptors)."""
    size, size_v = q_1HTD.shape[3], v_1GTE.shape[3]
    block_d, block_e = (max(16, triton.next_power_of_2(x)) for x in (size, size_v))
    inputs = (q_1HTD, k_1GTD, v_1GTE, *dout_1HTE)
    blocks = ((tiles.block_q, block_d), (tiles.block_k, block_d), (tiles.block_k, block_e), (tiles.block_q, block_e))
    tma = tiles.tma and all(_suits_tma(x) for x in inputs)
    sources = [_descriptor(x, *block) for x, block in zip(inputs, blocks, strict=False)] if tma else list(inputs)
    launch = {
        "TMA": tma, "R": q_1HTD.shape[1] // k_1GTD.shape[1], "SOFTCAP": softcap > 0, "D": size, "E": size_v,
        "BLOCK_D": block_d, "BLOCK_E": block_e, "BLOCK_Q": tiles.block_q, "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip
    return launch, sources


def _suits_tma(x_1HTD: Tensor) -> bool:
    steps = (x_1HTD.data_ptr(), *(x_1HTD.stride(axis) * x_1HTD.element_size() for axis in (1, 2)))
    return all(step > 0 and step % 16 == 0 for step in steps)


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    """Blocks of `block` of the last axes of x; of leading axes, if more, one index each."""
    x = x[0] if x.dim() == 4 else x
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1] * (x.dim() - len(block)) + list(block))


def _bounds(document_ids_T: Tensor, num_tokens: int, window: int) -> tuple[Tensor, Tensor]:
    """(low_T, high_T): token t sees [low, t] and is seen by [t, high)."""
    bounds_2T = torch.empty(2, num_tokens, dtype=torch.int32, device=document_ids_T.device)
    block = attention_triton.BLOCK_BOUNDS
    with torch.cuda.device_of(document_ids_T):
        attention_triton.bounds_kernel[(triton.cdiv(num_tokens, block),)](
            document_ids_T.contiguous(), bounds_2T[0], bounds_2T[1], num_tokens, window,
            ONE_DOCUMENT=document_ids_T.numel() == 1, STEPS=num_tokens.bit_length() + 1, BLOCK=block,
        )  # fmt: skip
    return bounds_2T[0], bounds_2T[1]


def _stats(out_1HTE: Tensor, dout_1HTE: Tensor, lse_1HT: Tensor) -> tuple[Tensor, Tensor]:
    """(lse in log2 units, delta), both (H, T) with rows a multiple of 16 bytes apart."""
    _, num_heads, num_tokens, size_v = out_1HTE.shape
    stats_2HT = lse_1HT.new_empty(2, num_heads, triton.cdiv(num_tokens, 4) * 4)[:, :, :num_tokens]
    block = attention_triton.BLOCK_STATS
    attention_triton.stats_kernel[(triton.cdiv(num_tokens, block), num_heads)](
        out_1HTE, dout_1HTE, lse_1HT, stats_2HT[0], stats_2HT[1], num_tokens, *_strides(out_1HTE, dout_1HTE),
        stats_2HT.stride(1), E=size_v, BLOCK_E=max(16, triton.next_power_of_2(size_v)), BLOCK=block,
    )  # fmt: skip
    return stats_2HT[0], stats_2HT[1]

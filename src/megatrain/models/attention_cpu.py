"""Attention on the CPU: per document, per block of queries; memory grows with T, never with T x T.

Every document is copied to fresh, aligned buffers and cut into blocks from its own first token. So its bits depend on
its own tokens only: not on its neighbours, not on its place in the pack. Sums run in a fixed order.

Legend: 1 batch of one, H query heads, G key/value heads, R = H / G, T tokens of the pack, N tokens of one document,
B queries of a block, S keys a block can see, D head size of queries and keys, E of values.

    s = softcap(scale * q k^T),  keys: same document, 0 <= t - s < window
    p = exp(s - lse),  lse = log(sum exp(s) + exp(sink)),  out = p v
    dv = p^T do,  dp = do v^T,  delta = sum(do * out),  ds = p (dp - delta),  dsink = -sum(exp(sink - lse) delta)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_TOKENS = 128  # queries of a block: 128 is within 5 % of the best of 64 … 512 at 135M shapes on 2 cores


class _Block(NamedTuple):
    """Queries [first, last) of a document see keys [low, last); of those, [low, full_low) and [first, last) partly."""

    first: int
    last: int
    low: int


def documents(document_ids_T: Tensor, num_tokens: int) -> list[slice]:
    """Token ranges of the documents of a pack, in order. One id alone: the whole pack is one document."""
    if document_ids_T.numel() == 1:
        return [slice(0, num_tokens)]
    _, lengths = torch.unique_consecutive(document_ids_T, return_counts=True)
    ranges, start = [], 0
    for length in lengths.tolist():
        ranges.append(slice(start, start + length))
        start += length
    assert start == num_tokens, f"{start} document ids for {num_tokens} tokens"
    return ranges


def forward(
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, document_ids_T: Tensor, sinks_H: Tensor | None,
    scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (out_1THE in the dtype of q, lse_1HT in the compute dtype)."""
    _, num_heads, num_tokens, _ = q_1HTD.shape
    groups, dtype = k_1GTD.shape[1], _compute_dtype(q_1HTD)
    out_1THE = q_1HTD.new_empty(1, num_tokens, num_heads, v_1GTE.shape[3])
    lse_1HT = q_1HTD.new_empty(1, num_heads, num_tokens, dtype=dtype)
    sinks_GR11 = None if sinks_H is None else sinks_H.to(dtype).reshape(groups, -1, 1, 1)
    for document in documents(document_ids_T, num_tokens):
        q_GRND = _document(q_1HTD, document, dtype).unflatten(0, (groups, -1))
        k_GND, v_GNE = _document(k_1GTD, document, dtype), _document(v_1GTE, document, dtype)
        for block in _blocks(k_GND.shape[1], window):
            s_GRBS, _ = _scores(q_GRND, k_GND, block, scale, window, softcap)
            peak_GRB1 = s_GRBS.amax(3, keepdim=True)
            if sinks_GR11 is not None:
                peak_GRB1 = torch.maximum(peak_GRB1, sinks_GR11)
            p_GRBS = s_GRBS.sub_(peak_GRB1).exp_()
            sum_GRB1 = p_GRBS.sum(3, keepdim=True)
            if sinks_GR11 is not None:
                sum_GRB1 += (sinks_GR11 - peak_GRB1).exp()
            o_GRBE = _times(p_GRBS, v_GNE[:, block.low : block.last]) / sum_GRB1
            rows = slice(document.start + block.first, document.start + block.last)
            out_1THE[0, rows] = o_GRBE.flatten(0, 1).transpose(0, 1)
            lse_1HT[0, :, rows] = (peak_GRB1 + sum_GRB1.log()).flatten(0, 1).squeeze(2)
    return out_1THE, lse_1HT


def backward(
    dout_1THE: Tensor, q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, document_ids_T: Tensor, sinks_H: Tensor | None,
    out_1THE: Tensor, lse_1HT: Tensor, scale: float, window: int, softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (dq, dk, dv, dsinks) shaped and typed like their inputs (dsinks empty without sinks)."""
    groups, dtype = k_1GTD.shape[1], _compute_dtype(q_1HTD)
    dq_1HTD, dk_1GTD, dv_1GTE = empty_gradients(q_1HTD, k_1GTD, v_1GTE)
    delta_1HT = (dout_1THE.to(dtype) * out_1THE.to(dtype)).sum(3).transpose(1, 2)
    for document in documents(document_ids_T, q_1HTD.shape[2]):
        q_GRND = _document(q_1HTD, document, dtype).unflatten(0, (groups, -1))
        do_GRNE = _document(dout_1THE.transpose(1, 2), document, dtype).unflatten(0, (groups, -1))
        lse_GRN1 = lse_1HT[0, :, document].unflatten(0, (groups, -1)).unsqueeze(3)
        delta_GRN1 = delta_1HT[0, :, document].unflatten(0, (groups, -1)).unsqueeze(3)
        k_GND, v_GNE = _document(k_1GTD, document, dtype), _document(v_1GTE, document, dtype)
        dk_GND, dv_GNE = torch.zeros_like(k_GND), torch.zeros_like(v_GNE)
        for block in _blocks(k_GND.shape[1], window):
            rows, keys = slice(block.first, block.last), slice(block.low, block.last)
            s_GRBS, slope_GRBS = _scores(q_GRND, k_GND, block, scale, window, softcap)
            p_GRBS = s_GRBS.sub_(lse_GRN1[:, :, rows]).exp_()
            do_GRBE = do_GRNE[:, :, rows]
            dv_GNE[:, keys] += _transposed_times(p_GRBS, do_GRBE)
            ds_GRBS = _times(do_GRBE, v_GNE[:, keys].transpose(1, 2)).sub_(delta_GRN1[:, :, rows]).mul_(p_GRBS)
            if slope_GRBS is not None:
                ds_GRBS.mul_(slope_GRBS)
            ds_GRBS.mul_(scale)
            dk_GND[:, keys] += _transposed_times(ds_GRBS, q_GRND[:, :, rows])
            at = slice(document.start + block.first, document.start + block.last)
            dq_1HTD[0, :, at] = _times(ds_GRBS, k_GND[:, keys]).flatten(0, 1)
        dk_1GTD[0, :, document] = dk_GND
        dv_1GTE[0, :, document] = dv_GNE
    if sinks_H is None:
        return dq_1HTD, dk_1GTD, dv_1GTE, q_1HTD.new_empty(0)
    return dq_1HTD, dk_1GTD, dv_1GTE, sink_gradient(sinks_H, lse_1HT, delta_1HT)


def sink_gradient(sinks_H: Tensor, lse_1HT: Tensor, delta_1HT: Tensor) -> Tensor:
    """dsinks, typed like the sinks."""
    p_sink_HT = (sinks_H.to(lse_1HT.dtype).unsqueeze(1) - lse_1HT[0]).exp_()
    return (p_sink_HT * delta_1HT[0]).sum(1).neg_().to(sinks_H.dtype)


def empty_gradients(*inputs_1HTD: Tensor) -> list[Tensor]:
    """Uninitialised gradients, shaped (1, heads, T, size) but laid out token by token as the projections want them."""
    return [x.new_empty(1, x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in inputs_1HTD]


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _document(x_1HTD: Tensor, document: slice, dtype: torch.dtype) -> Tensor:
    """(H, N, D): a fresh copy even of a contiguous input, since products round by the alignment of their inputs."""
    return x_1HTD[0, :, document].to(dtype, copy=True, memory_format=torch.contiguous_format)


def _blocks(num_tokens: int, window: int) -> Iterator[_Block]:
    for first in range(0, num_tokens, BLOCK_TOKENS):
        low = max(0, first - window + 1) if window else 0
        yield _Block(first, min(first + BLOCK_TOKENS, num_tokens), low - low % BLOCK_TOKENS)


def _scores(
    q_GRND: Tensor, k_GND: Tensor, block: _Block, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Masked scores of a block, and the slope of the soft-cap where there is one."""
    first, last, low = block
    s_GRBS = _times(q_GRND[:, :, first:last], k_GND[:, low:last].transpose(1, 2))
    slope_GRBS = None
    if softcap:
        tanh_GRBS = s_GRBS.mul_(scale / softcap).tanh_()
        slope_GRBS = 1 - tanh_GRBS * tanh_GRBS
        s_GRBS = tanh_GRBS.mul_(softcap)
    else:
        s_GRBS.mul_(scale)
    t_B, s_S = torch.arange(first, last, device=k_GND.device), torch.arange(low, last, device=k_GND.device)
    age_BS = t_B.unsqueeze(1) - s_S
    if window:
        s_GRBS.masked_fill_((age_BS < 0) | (age_BS >= window), float("-inf"))
    else:
        s_GRBS[..., first - low :].masked_fill_(age_BS[:, first - low :] < 0, float("-inf"))
    return s_GRBS, slope_GRBS


def _times(x_GRBS: Tensor, y_GSE: Tensor) -> Tensor:
    """x y for every query head of a group."""
    return torch.bmm(x_GRBS.flatten(1, 2), y_GSE).unflatten(1, x_GRBS.shape[1:3])


def _transposed_times(x_GRBS: Tensor, y_GRBE: Tensor) -> Tensor:
    """x^T y, summed over the query heads of a group."""
    return torch.bmm(x_GRBS.flatten(1, 2).transpose(1, 2), y_GRBE.flatten(1, 2))

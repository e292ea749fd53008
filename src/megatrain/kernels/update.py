"""The optimizer step over flat spans in HBM, and the sums of squares of the gradients there. Formulas: optim.spec.

Everything is queued on the current stream; nothing waits for it. This module loads without CUDA and without Triton;
its functions then have no tensors to take.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.models.layout import Entry
from megatrain.optim.spec import Scalars

if importlib.util.find_spec("triton") is not None:
    from megatrain.kernels import triton_update


def adamw_split_(hi: Tensor, lo: Tensor, m: Tensor, v: Tensor, grad: Tensor, scalars: Scalars, *, decay: bool) -> None:
    """One AdamW step in place: hi bf16, lo int16, m, v and grad fp32, all flat and of one size. Bits of the spec."""
    assert (hi.dtype, lo.dtype) == (torch.bfloat16, torch.int16), f"hi {hi.dtype}, lo {lo.dtype}"
    _launch_adamw(hi.view(torch.int16), lo, m, v, grad, scalars, decay)


def adamw_fp32_(w: Tensor, m: Tensor, v: Tensor, grad: Tensor, scalars: Scalars, *, decay: bool) -> None:
    """One AdamW step in place: all fp32, flat and of one size. Bits of the spec."""
    assert w.dtype == torch.float32, f"w {w.dtype}"
    _launch_adamw(w, None, m, v, grad, scalars, decay)


def tensor_sums(flat_grad: Tensor, entries: Sequence[Entry]) -> Tensor:
    """Sums of squares of the tensors at `entries` of a segment's flat fp32 gradient: fp64, on its device, in order.

    Bits of spec.tensor_sum_squares. Two launches for any number of tensors.
    """
    assert flat_grad.dtype == torch.float32, f"gradient {flat_grad.dtype}"
    assert flat_grad.is_contiguous(), f"gradient of strides {flat_grad.stride()}"
    sums = torch.empty(len(entries), dtype=torch.float64, device=flat_grad.device)
    if not entries:
        return sums
    tables = _tables(tuple((e.offset, e.tensor.shape) for e in entries), flat_grad.device)
    num_leaves = tables.leaf_starts.numel()
    values = torch.empty(num_leaves, dtype=torch.float64, device=flat_grad.device)
    with torch.cuda.device_of(flat_grad):
        if num_leaves:
            triton_update.leaf_kernel[(num_leaves,)](flat_grad, tables.leaf_starts, tables.leaf_counts, values)
        triton_update.tensor_kernel[(len(entries),)](
            flat_grad, values, tables.tensor_starts, tables.tensor_counts, tables.one_element_leaves, sums
        )
    return sums


class _Tables(NamedTuple):
    """Where leaves and tensors lie, on the device.

    A tensor whose leaves are single elements has none in the leaf table: its start counts elements of the gradient, the
    others' count leaf values.
    """

    leaf_starts: Tensor  # int64
    leaf_counts: Tensor  # int64
    tensor_starts: Tensor  # int64
    tensor_counts: Tensor  # int64
    one_element_leaves: Tensor  # int32: 0 or 1


@functools.lru_cache(maxsize=64)  # layers of one shape share their tables; a model has a handful of shapes
def _tables(places: tuple[tuple[int, tuple[int, ...]], ...], device: torch.device) -> _Tables:
    leaf_starts, leaf_counts, tensors = [], [], []
    num_leaves = 0
    for offset, shape in places:
        rows = shape[0] if shape else 1
        columns = functools.reduce(lambda x, y: x * y, shape[1:], 1)
        if columns == 1 or not rows * columns:
            tensors.append((offset, rows * columns, 1))
            continue
        tensors.append((num_leaves, rows, 0))
        leaf_starts.append(torch.arange(rows, dtype=torch.int64) * columns + offset)
        leaf_counts.append(torch.full((rows,), columns, dtype=torch.int64))
        num_leaves += rows
    empty = torch.empty(0, dtype=torch.int64)
    starts, counts, single = torch.tensor(tensors, dtype=torch.int64).T.contiguous()
    return _Tables(
        torch.cat([empty, *leaf_starts]).to(device), torch.cat([empty, *leaf_counts]).to(device),
        starts.to(device), counts.to(device), single.to(device, torch.int32),
    )  # fmt: skip


def _launch_adamw(
    w: Tensor, lo: Tensor | None, m: Tensor, v: Tensor, grad: Tensor, scalars: Scalars, decay: bool
) -> None:
    count = w.numel()
    assert all(x.is_contiguous() and x.numel() == count for x in (w, m, v, grad)), "flat spans of one size"
    assert all(x.dtype == torch.float32 for x in (m, v, grad)), "m, v and grad are fp32"
    if not count:
        return
    block = triton_update.BLOCK_UPDATE
    with torch.cuda.device_of(w):
        triton_update.adamw_kernel[(-(-count // block),)](
            w, lo, m, v, grad, count, *scalars, SPLIT=lo is not None, DECAY=decay, BLOCK=block, enable_fp_fusion=False
        )

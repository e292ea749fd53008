"""Pinning: page-locks host buffers for DMA, in pieces, and says plainly when that is refused.

CUDA refuses a copy that spans two registrations ("invalid argument", seen on an H200), so a buffer is registered by
itself, in pieces counted from its own start, and `copy_in_pieces` never crosses a piece.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatrain.hardware.probe import clear_last_error
from megatrain.memory.limits import locked_memory_limit_bytes

# One registration of several GiB is refused on some systems as "invalid argument".
PIECE_BYTES = 1 << 30


@dataclass(frozen=True)
class Pinned:
    """What `register` reached. All or nothing: a copy that spans pinned and plain pages is refused by CUDA.

    `pieces`: (address, bytes) of each registration. `refused`: None, or one sentence with numbers and a remedy.
    """

    num_bytes: int
    pieces: tuple[tuple[int, int], ...]
    refused: str | None

    @property
    def pinned_bytes(self) -> int:
        return sum(size_bytes for _, size_bytes in self.pieces)


def register(buffers: Sequence[Tensor]) -> Pinned:
    """Page-locks whole, page-aligned host buffers for CUDA. Needs a CUDA device. On refusal nothing stays pinned."""
    runtime = torch.cuda.cudart()
    assert runtime is not None
    total_bytes = sum(buffer.nbytes for buffer in buffers)
    pieces: list[tuple[int, int]] = []
    for buffer in buffers:
        for start_bytes in range(0, buffer.nbytes, PIECE_BYTES):
            size_bytes = min(PIECE_BYTES, buffer.nbytes - start_bytes)
            status = int(runtime.cudaHostRegister(buffer.data_ptr() + start_bytes, size_bytes, 0))
            if status != 0:
                pinned = Pinned(total_bytes, tuple(pieces), None)
                refused = _refusal(total_bytes, pinned.pinned_bytes, status)
                clear_last_error()
                unregister(pinned)
                return Pinned(total_bytes, (), refused)
            pieces.append((buffer.data_ptr() + start_bytes, size_bytes))
    return Pinned(total_bytes, tuple(pieces), None)


def pin(buffers: Sequence[Tensor]) -> Pinned:
    """`register`, and a warning where that is refused: copies go on, slower."""
    pinned = register(buffers)
    if pinned.refused:
        warnings.warn(f"{pinned.refused}; copies will be slower", stacklevel=3)
    return pinned


def copy_in_pieces(target: Tensor, source: Tensor) -> None:
    """target.copy_(source), asynchronous on the current stream. One of them is a whole registered buffer, both 1-D.

    Between host buffers: at once, by one thread. The framework would start a team of threads in every lane, whose idle
    members spin on the cores that the compute lane needs.
    """
    if not (target.is_cuda or source.is_cuda):
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
        return
    piece = PIECE_BYTES // source.itemsize
    for start in range(0, source.numel(), piece):
        target[start : start + piece].copy_(source[start : start + piece], non_blocking=True)


def unregister(pinned: Pinned) -> None:
    """Undoes `register`. Call it before the arena closes, with no copy in flight."""
    runtime = torch.cuda.cudart()
    assert runtime is not None
    for address, _ in pinned.pieces:
        status = int(runtime.cudaHostUnregister(address))
        if status != 0:
            raise RuntimeError(f"cudaHostUnregister({address:#x}) failed with CUDA error {status}")


def _refusal(num_bytes: int, pinned_bytes: int, status: int) -> str:
    limit_bytes = locked_memory_limit_bytes()
    limit = "unlimited" if limit_bytes is None else f"{limit_bytes:,} bytes"
    return (
        f"pinning host memory was refused with CUDA error {status} after {pinned_bytes:,} of {num_bytes:,} bytes "
        f"(locked-memory limit: {limit}); raise `ulimit -l`, the container's memory limit, or lower the ram budget"
    )

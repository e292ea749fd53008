"""Pinning: page-locks a host arena for DMA, in pieces, and says plainly when that is refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain.memory.host import HostArena
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


def register(arena: HostArena) -> Pinned:
    """Page-locks the whole arena for CUDA. Needs a CUDA device. On refusal nothing stays pinned."""
    runtime = torch.cuda.cudart()
    address = arena.view(0, arena.num_bytes, torch.uint8).data_ptr()
    pieces: list[tuple[int, int]] = []
    for start_bytes in range(0, arena.num_bytes, PIECE_BYTES):
        size_bytes = min(PIECE_BYTES, arena.num_bytes - start_bytes)
        status = int(runtime.cudaHostRegister(address + start_bytes, size_bytes, 0))
        if status != 0:
            refused = _refusal(arena.num_bytes, start_bytes, status)
            unregister(Pinned(arena.num_bytes, tuple(pieces), refused))
            return Pinned(arena.num_bytes, (), refused)
        pieces.append((address + start_bytes, size_bytes))
    return Pinned(arena.num_bytes, tuple(pieces), None)


def unregister(pinned: Pinned) -> None:
    """Undoes `register`. Call it before the arena closes, with no copy in flight."""
    runtime = torch.cuda.cudart()
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

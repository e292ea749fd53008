"""DeviceArena: one allocation on a device, carved into named pieces by a table."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatrain.errors import PlanError

ALIGN_BYTES = 256


# Kernels and libraries that are loaded after the cap is set: up to 263 MiB seen on an H200, where layers run eagerly.
LATE_MODULES_BYTES = 320 << 20


def cap_device_memory(budget_bytes: int, late_modules_bytes: int = LATE_MODULES_BYTES) -> None:
    """Hold this process to `budget_bytes` of the current GPU's memory as the driver counts it, CUDA's context included.

    `late_modules_bytes`: room for what CUDA has yet to load.
    PlanError if the context alone leaves nothing. Beyond the cap, allocations raise torch.OutOfMemoryError.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved() + late_modules_bytes
    if outside_bytes >= budget_bytes:
        raise PlanError(
            f"memory.hbm is {budget_bytes:,} bytes, but CUDA itself and other programs take {outside_bytes:,}; raise it"
        )
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget_bytes - outside_bytes) / total_bytes))


class DeviceArena:
    """Named, 256-byte-aligned pieces of one allocation: `table` maps name to bytes. Contents start undefined."""

    def __init__(self, table: Mapping[str, int], device: torch.device) -> None:
        self._pieces: dict[str, tuple[int, int]] = {}  # name -> (offset, size), bytes
        offset_bytes = 0
        for name, size_bytes in table.items():
            if size_bytes < 0:
                raise ValueError(f"piece {name} of {size_bytes} bytes: give a size of at least 0")
            self._pieces[name] = (offset_bytes, size_bytes)
            offset_bytes += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.device = device
        self.num_bytes = offset_bytes
        # CPU allocations are aligned to 64 bytes only: take a little more and start at the first aligned byte.
        whole = torch.empty(offset_bytes + ALIGN_BYTES, dtype=torch.uint8, device=device)
        start = -whole.data_ptr() % ALIGN_BYTES
        self._bytes = whole[start : start + offset_bytes]

    def view(self, name: str, count: int, dtype: torch.dtype, offset_bytes: int = 0) -> Tensor:
        """1-D tensor of `count` elements in piece `name`, from `offset_bytes` into it: zero-copy, bounds checked."""
        start_bytes, size_bytes = self._pieces[name]
        stop_bytes = offset_bytes + count * dtype.itemsize
        if offset_bytes < 0 or count < 0 or stop_bytes > size_bytes:
            raise ValueError(f"bytes [{offset_bytes}, {stop_bytes}) are no part of {name}, {size_bytes} bytes long")
        if offset_bytes % dtype.itemsize:
            raise ValueError(f"offset {offset_bytes} is not a multiple of {dtype.itemsize}, the size of {dtype}")
        # .data: a version counter of its own. Views share their base's, and autograd would take a copy into one slot
        # for a change of the weights it saved in another.
        return self._bytes[start_bytes + offset_bytes : start_bytes + stop_bytes].view(dtype).data

    def poison(self, name: str) -> None:
        """For tests: fills the piece with 0xFF, a NaN in every floating-point type, so that stale reads show."""
        start_bytes, size_bytes = self._pieces[name]
        self._bytes[start_bytes : start_bytes + size_bytes].fill_(0xFF)

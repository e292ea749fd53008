"""WaitingInputs: pinned RAM in which inputs of blocks wait from the forward pass to the backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from megatrain.memory import HostArena, Pinned, padded, pin, unregister


class WaitingInputs:
    """One flat buffer of `num_elements` for each block of `blocks` and micro-batch of a round; pinned for a GPU."""

    def __init__(
        self, blocks: tuple[int, ...], round_micro_batches: int, num_elements: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._pinned: Pinned | None = None
        self._arena: HostArena | None = None
        self._round_micro_batches = round_micro_batches
        if not blocks:
            return
        one_bytes = padded(num_elements * dtype.itemsize)
        keys = [(block, m) for block in blocks for m in range(round_micro_batches)]
        self._arena = HostArena(one_bytes * len(keys))
        for index, key in enumerate(keys):
            self._buffers[key] = self._arena.view(index * one_bytes, num_elements, dtype)
        if device.type == "cuda":
            self._pinned = pin(list(self._buffers.values()))

    def flat(self, block: int, micro_batch: int) -> Tensor:
        """Where the input of `block` waits; micro-batches of different rounds share their buffers."""
        return self._buffers[block, micro_batch % self._round_micro_batches]

    def close(self) -> None:
        """Unpins and gives the memory back; no copy may be in flight."""
        if self._pinned is not None:
            unregister(self._pinned)
            self._pinned = None
        self._buffers.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

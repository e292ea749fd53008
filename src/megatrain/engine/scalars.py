"""Scalars: the few numbers of a step that the host reads at its end (losses, sums of squares)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class Scalars:
    """fp64 numbers by name. `put` on the lane that computed them, `get` once a wait says that the lane has come so far.

    They stay where they were computed until `get`. Copying each home at once was tried: on an H200 the few bytes
    queued behind the gradient's DRAIN in the same copy engine and held the compute lane up for 16 ms a layer.
    """

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}

    def put(self, name: str, values: Tensor | np.ndarray) -> None:
        """Store fp64 `values` (0-d or 1-D) under `name`."""
        self._values[name] = torch.as_tensor(values).reshape(-1)

    def get(self, names: Sequence[str]) -> list[list[float]]:
        """The numbers last put under each name; one transfer, which waits for it."""
        if not names:
            return []
        parts = [self._values[name] for name in names]
        numbers = iter(torch.cat(parts).tolist())
        return [[next(numbers) for _ in range(part.numel())] for part in parts]

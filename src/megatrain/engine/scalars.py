"""Scalars: the few numbers of a step that the host reads (losses, sums of squares), sent without a synchronisation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Scalars:
    """Numbers by name. `put` on the lane that computed them; `get` once a wait says that lane has come past the `put`.

    From a GPU they travel by an asynchronous copy into pinned memory, allocated at a name's first use and kept:
    `Tensor.item()` would stop the issuing thread, and with it the lane.
    """

    def __init__(self) -> None:
        self._host: dict[str, Tensor] = {}

    def put(self, name: str, values: Tensor | np.ndarray) -> None:
        """Store fp64 `values` (0-d or 1-D) under `name`."""
        source = torch.as_tensor(values)
        target = self._host.get(name)
        if target is None:
            target = self._host[name] = torch.empty(source.shape, dtype=torch.float64, pin_memory=source.is_cuda)
        target.copy_(source, non_blocking=True)

    def get(self, name: str) -> list[float]:
        """The numbers last put under `name`."""
        return self._host[name].reshape(-1).tolist()

"""Which form of the optimizer's formulas runs where: numpy/native over host memory, Triton over HBM. Same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megatrain import kernels, optim
from megatrain.models.layout import Entry, Layout

State = Mapping[str, Tensor]  # kind -> a segment's flat buffer of it


class Rule(Protocol):
    """The update over a segment's flat buffers, and the sums of squares of its tensors."""

    def update(self, layout: Layout, w: Tensor, state: State, g: Tensor, scalars: optim.Scalars) -> None:
        """One step in place over `layout`'s `w` and `state`. Without "lo", `w` is the fp32 master."""

    def sums(self, layout: Layout, g: Tensor) -> Tensor | np.ndarray:
        """Sum of squares of each trainable tensor, in layout order, fp64."""


def _numpy(tensor: Tensor) -> np.ndarray:
    """The same memory as numpy sees it; bf16 becomes its bits (uint16)."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def trainable_entries(layout: Layout) -> Sequence[Entry]:
    """The entries that have a gradient, in layout order."""
    return [entry for entry in layout.entries if entry.tensor.trainable]


class HostRule:
    """The native core (or numpy) over host memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def update(self, layout: Layout, w: Tensor, state: State, g: Tensor, scalars: optim.Scalars) -> None:
        lo, m, v = state.get("lo"), state["m"], state["v"]
        for span in layout.spans:
            cut = slice(span.start, span.stop)
            wn, mn, vn, gn = (_numpy(t[cut]) for t in (w, m, v, g))
            if lo is None:
                optim.update_fp32(wn, mn, vn, gn, scalars, decay=span.decay, threads=self.threads)
            else:
                optim.update_split(wn, _numpy(lo[cut]), mn, vn, gn, scalars, decay=span.decay, threads=self.threads)

    def sums(self, layout: Layout, g: Tensor) -> np.ndarray:
        flat = g.numpy()
        return np.array(
            [
                optim.tensor_sum_squares(flat[e.offset : e.stop].reshape(e.tensor.shape), threads=self.threads)
                for e in trainable_entries(layout)
            ]
        )


class DeviceRule:
    """The Triton kernels over HBM; queued on the current stream."""

    def update(self, layout: Layout, w: Tensor, state: State, g: Tensor, scalars: optim.Scalars) -> None:
        lo, m, v = state.get("lo"), state["m"], state["v"]
        for span in layout.spans:
            cut = slice(span.start, span.stop)
            if lo is None:
                kernels.adamw_fp32_(w[cut], m[cut], v[cut], g[cut], scalars, decay=span.decay)
            else:
                kernels.adamw_split_(w[cut], lo[cut], m[cut], v[cut], g[cut], scalars, decay=span.decay)

    def sums(self, layout: Layout, g: Tensor) -> Tensor:
        return kernels.tensor_sums(g, trainable_entries(layout))


def device_rule(device: torch.device, host_rule: HostRule) -> Rule:
    """The rule for buffers on `device`."""
    return DeviceRule() if device.type == "cuda" else host_rule


class Averaged:
    """A rule that also keeps a running average of the masters, in the same place."""

    def __init__(self, rule: Rule, decay: float, threads: int) -> None:
        self._rule = rule
        self._share = optim.average_share(decay)
        self._threads = threads
        self.sums = rule.sums

    def update(self, layout: Layout, w: Tensor, state: State, g: Tensor, scalars: optim.Scalars) -> None:
        """The rule's own, then the average over the trained part of `w`."""
        self._rule.update(layout, w, state, g, scalars)
        masters, threads = w[: layout.num_trainable], 1 if w.is_cuda else self._threads
        kernels.average_(state["ema"], masters, state.get("lo"), self._share, threads=threads)


def with_average(rule: Rule, decay: float | None, threads: int) -> Rule:
    """`rule`, keeping an average too, by `threads` of the CPU, unless `decay` is None."""
    return rule if decay is None else Averaged(rule, decay, threads)

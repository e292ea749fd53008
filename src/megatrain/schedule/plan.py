"""Plan: where every byte lives and what is recomputed. Placement only: no field of it may change a bit of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["hbm", "ram", "disk"]


@dataclass(frozen=True)
class SegmentPlan:
    """Placement of one segment.

    `weights`: "pool" (fetched into a shared slot at each visit), or "own" (a slot of its own: fetched once after
    each update, or never if `state` is "hbm").  EMBED and HEAD are always "own".
    `grads`: "pool" (summed in a shared slot, drained to the gradient home in RAM at the end of each visit), or "own"
    (stays in HBM over all rounds; drained once if `state` is "ram").
    `state`: home of lo, m, v; the update runs there: "hbm" on the compute lane (needs weights and grads "own"),
    "ram" on the host lane.
    `activations`: "recompute" keeps only the block's input; "keep" keeps autograd's saved tensors.
    """

    name: str
    kind: Literal["embed", "block", "head"]
    trainable: bool  # False: no state, no gradient, no update; gradients still flow through
    weights: Literal["pool", "own"] = "pool"
    grads: Literal["pool", "own"] = "pool"
    state: Tier = "ram"
    activations: Literal["recompute", "keep"] = "recompute"


@dataclass(frozen=True)
class Plan:
    """The chosen placement of a run. `segments` in travel order: EMBED, L000 …, HEAD."""

    segments: tuple[SegmentPlan, ...]
    tied: bool
    weight_slots: int  # shared slots W0 … for blocks, >= 2 when more than one block is "pool"
    grad_slots: int  # shared slots G0 …
    round_micro_batches: int  # at most this many micro-batches go through the layers together

    @property
    def blocks(self) -> tuple[SegmentPlan, ...]:
        return self.segments[1:-1]

"""Ledger: the bytes of a plan by what they are part of, from one entry a segment that is worked out once. No torch.

The search asks for the memory of ten thousand plans that are made of the same few hundred segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from megatrain.planner import sizes
from megatrain.planner.known import Known
from megatrain.planner.landing import Extent, extents_of, largest_of
from megatrain.planner.sizes import Shapes
from megatrain.schedule.plan import Plan, SegmentPlan


class Entry(NamedTuple):
    """Bytes of one segment; 0 where its placement has none. Of activations: for one micro-batch."""

    own: int  # homes and own slots on the device
    shared_weights: int  # of a shared slot
    shared_gradient: int
    passing_state: int  # of a shared slot
    ram_weights: int
    ram_state: int
    disk_weights: int
    disk_state: int
    drained_gradient: int  # that goes to its home
    attended: int
    kept: int
    offloaded: int  # 1: its input passes through the shared slots
    backward: int  # working memory, beside what is kept
    extents: tuple[Extent, ...]


class Entries:
    """The entries of the segments of one run's plans."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.different: list[Entry] = []  # few: blocks alike that are placed alike have equal ones
        self._known = Known()

    def of(self, segments: Sequence[SegmentPlan]) -> list[int]:
        """Which of the entries that differ each segment has."""

        def number(index: int) -> int:
            entry = _worked_out(self.shapes, segments[index])
            if entry not in self.different:
                self.different.append(entry)
            return self.different.index(entry)

        return self._known.of(segments, number)


def _worked_out(shapes: Shapes, segment: SegmentPlan) -> Entry:
    weights, state, gradient = shapes.segment_bytes[segment.name]
    away, is_block = segment.state != "hbm", segment.kind == "block"
    is_kept = segment.activations == "keep"
    return Entry(
        own=sizes.segment_hbm_bytes(shapes, segment),
        shared_weights=weights if is_block and segment.weights == "pool" else 0,
        shared_gradient=gradient if is_block and segment.grads == "pool" and segment.trainable else 0,
        passing_state=state if segment.streams_state else 0,
        ram_weights=weights if away and not segment.weights_on_disk else 0,
        ram_state=state if away and not segment.state_on_disk else 0,
        disk_weights=weights if away and segment.weights_on_disk else 0,
        disk_state=state if away and segment.state_on_disk else 0,
        drained_gradient=gradient if away else 0,
        attended=shapes.attended_bytes[segment.name] if segment.activations == "keep_attention" else 0,
        kept=shapes.saved_bytes[segment.name] if is_block and is_kept else 0,
        offloaded=int(is_block and segment.activations == "offload"),
        backward=sizes.backward_working_bytes(shapes, segment.name, is_kept) if is_block else 0,
        extents=extents_of(segment, shapes.layouts[segment.name], shapes.compute_bytes),
    )


class Ledger:
    """The entries of a plan, and what they come to."""

    def __init__(self, entries: Entries, plan: Plan) -> None:
        self._shapes, self._plan = entries.shapes, plan
        numbers = entries.of(plan.segments)
        counts = Counter(numbers)
        self._each = [entries.different[number] for number in numbers]
        self._counts = list(counts.values())
        rows = zip(*(entries.different[number] for number in counts), strict=True)
        self._columns = dict(zip(Entry._fields, rows, strict=True))

    def total_bytes(self, part: str) -> int:
        """Of a field of `Entry`, over all segments."""
        return sum(map(mul, self._columns[part], self._counts))

    def ends_bytes(self) -> int:
        """Homes and own slots of EMBED and HEAD."""
        return self._each[0].own + self._each[-1].own

    def pool_bytes(self) -> tuple[int, int]:
        """(Shared weight slots, shared gradient slots); a slot is as large as the largest block that visits it."""
        weights, gradient = max(self._columns["shared_weights"]), max(self._columns["shared_gradient"])
        return self._plan.weight_slots * weights, self._plan.grad_slots * gradient

    def passing_bytes(self) -> int:
        """Shared slots of states on their way through the device, each as large as the largest."""
        return self._plan.state_slots * max(self._columns["passing_state"])

    def tied_gradient_bytes(self) -> int:
        """The head's own sum for a tied embedding."""
        spec = self._shapes.spec
        return spec.vocab_size * spec.hidden_size * 4 if self._plan.has_tied_grad else 0

    def boundary_bytes(self) -> int:
        """Inputs of every block and of HEAD, and one gradient of them, for each micro-batch of a round; offloaded ones
        share slots."""
        count, offloaded = len(self._plan.segments), self.total_bytes("offloaded")
        if offloaded:
            count += self._plan.act_slots - offloaded
        return self.of_round(count * sizes.one_boundary_bytes(self._shapes))

    def kept_attention_bytes(self) -> int:
        """What attention gave to blocks that keep it, for each micro-batch of a round."""
        return self.of_round(self.total_bytes("attended"))

    def kept_bytes(self) -> int:
        """What autograd saved of blocks that keep it, for each micro-batch of a round."""
        return self.of_round(self.total_bytes("kept"))

    def waiting_bytes(self) -> int:
        """Inputs of blocks that wait in RAM for the backward pass."""
        if not self.total_bytes("offloaded"):
            return 0
        return self.of_round(len(self._plan.waiting_in_ram) * sizes.one_boundary_bytes(self._shapes))

    def gradient_homes_bytes(self) -> int:
        """Gradients that wait in RAM; in two passes they have no home, but slots on the way to the updates."""
        if self._plan.clip_mode == "deferred":
            return self.total_bytes("drained_gradient")
        return self._plan.grad_landing_slots * max(self._columns["drained_gradient"])

    def landing_bytes(self) -> int:
        """Landing slots in RAM of what lives on disk."""
        return self._plan.disk_slots * sum(largest_of(set(self._columns["extents"])).values())

    def working_bytes(self) -> dict[str, int]:
        """Phase -> its working memory, beside all that is kept.

        The backward pass gives up what a block kept before it comes to the one below, whose working memory takes its
        place; a second one finds nothing kept.
        """
        shapes, all_kept = self._shapes, self.kept_bytes()
        peak = max(self._columns["backward"])
        if all_kept:
            there = accumulate(self.of_round(entry.kept) for entry in self._each)
            peak = max(kept + entry.backward for kept, entry in zip(there, self._each, strict=True))
        if self._plan.clip_mode == "two-pass":
            peak = max(peak, shapes.block_working_bytes)
        return {
            "backward of a block": max(0, peak - all_kept),
            "head and loss": sizes.head_working_bytes(shapes),
            "backward of the embedding": max(0, sizes.embedding_working_bytes(shapes) - all_kept),
        }

    def of_round(self, num_bytes: int) -> int:
        """`num_bytes` of a micro-batch, for all that go through the layers together."""
        return self._plan.round_micro_batches * num_bytes

"""Changes: what sets two plans of the search apart, and plans with some of them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from megatrain.schedule.plan import Plan, SegmentPlan

Change = tuple[tuple[str, str], ...]
Filling = Sequence[tuple[int, Change]]  # (index of a segment, what changes), in the order in which they get the memory
RESIDENT: Change = (("state", "hbm"), ("weights", "own"), ("grads", "own"))
RESIDENT_AT_ONCE: Change = (("state", "hbm"), ("weights", "own"))  # in two passes the gradient is used up at once
PASSING: Change = (("update", "device"),)
KEPT: Change = (("activations", "keep"),)
ATTENTION_KEPT: Change = (("activations", "keep_attention"),)
INPUT_ASIDE: Change = (("activations", "offload"),)
STATE_ON_DISK: Change = (("state", "disk"),)
WEIGHTS_ON_DISK: Change = (("weights_home", "disk"),)
OWN_WEIGHTS: Change = (("weights", "own"), ("grads", "own"))
ALL_KEPT: Change = (("activations", "keep"), ("weights", "own"), ("grads", "own"))
OWN_WEIGHTS_AT_ONCE: Change = (("weights", "own"),)


def steps_of(plan: Plan, filling: Filling) -> Callable[[int], Plan]:
    """`plan` after so many of the changes."""
    last, steps = list(plan.segments), []
    for index, change in filling:
        last[index] = changed(last[index], change)
        steps.append((index, last[index]))

    def after(count: int) -> Plan:
        segments = list(plan.segments)
        for index, segment in steps[:count]:
            segments[index] = segment
        return replace(plan, segments=tuple(segments))

    return after


def changed_at(plan: Plan, indices: Sequence[int], change: Change) -> Plan:
    """`plan` with one change of several segments."""
    return steps_of(plan, [(index, change) for index in indices])(len(indices))


@lru_cache(maxsize=1 << 14)  # a search makes the same few segments some ten thousand times
def changed(segment: SegmentPlan, change: Change) -> SegmentPlan:
    """`segment` with a change."""
    return _the_one(replace(segment, **dict(change)))  # type: ignore[arg-type]


@lru_cache(maxsize=1 << 13)
def _the_one(segment: SegmentPlan) -> SegmentPlan:
    """Of all equal ones: they are looked up again and again, by identity."""
    return segment

"""Liveness: when a micro-batch's layer calls (rotary tables, masks) are dead. Its slots need no such list."""

from __future__ import annotations

from megatrain.schedule.ops import Place, Schedule


def last_calls(schedule: Schedule) -> frozenset[int]:
    """The id of every op that is the last one to read its micro-batch's layer calls."""
    last: dict[Place, int] = {}
    for op in schedule:
        for place in op.reads:
            if place.pool == "call":
                last[place] = id(op)
    return frozenset(last.values())

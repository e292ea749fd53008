"""Liveness: when boundary activations and the like are dead."""

from __future__ import annotations

from megatrain.schedule.ops import Place, Schedule

_FLOW_POOLS = ("act", "dact", "call", "kept", "attn")


def dead_after(schedule: Schedule) -> tuple[tuple[Place, ...], ...]:
    """For each op, the places of the flow pools that no later op touches: they may be freed once it is done."""
    last: dict[Place, int] = {}
    for index, op in enumerate(schedule):
        for place in (*op.reads, *op.writes):
            if place.pool in _FLOW_POOLS:
                last[place] = index
    dead: list[list[Place]] = [[] for _ in schedule]
    for place, index in last.items():
        dead[index].append(place)
    return tuple(map(tuple, dead))

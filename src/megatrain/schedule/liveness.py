"""Liveness: when boundary activations and the like are dead, and how many are alive at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

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


def peak(schedule: Schedule) -> Mapping[str, int]:
    """The most places of each flow pool (act, dact, call, kept, attn) that are alive during one op."""
    alive: Counter[str] = Counter()
    most: dict[str, int] = dict.fromkeys(_FLOW_POOLS, 0)
    born: set[Place] = set()
    for op, dead in zip(schedule, dead_after(schedule), strict=True):
        for place in op.writes:
            if place.pool in _FLOW_POOLS and place not in born:
                born.add(place)
                alive[place.pool] += 1
                most[place.pool] = max(most[place.pool], alive[place.pool])
        alive.subtract(place.pool for place in dead)
    return most

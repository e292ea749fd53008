"""Room: how many changes of a plan its memory holds, in few tables. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.planner.account import Question, memory_table
from megatrain.schedule.plan import Plan, Tier

Room = Sequence[float]


def room_bytes(question: Question, plan: Plan, tiers: Sequence[Tier]) -> Room:
    """What a plan leaves of each tier beside what must be to spare; below 0 it does not fit."""
    table = memory_table(question, plan)
    return [table.room_bytes(tier, spare=tier not in question.to_the_brim) for tier in tiers]


def border(room: Callable[[int], Room], fits: int, has: Room, fails: int, lacks: Room) -> int:
    """The last count on the way from `fits`, where the room is `has`, to `fails`, where it is `lacks`, where no room
    is below 0.

    One more takes about as much as any other, so the rooms at both ends tell where that is: four tables, where halving
    takes seven. Where one end has moved twice in a row, changes differ, and the way is halved.
    """
    way = 1 if fails > fits else -1
    in_a_row = 0  # how often the end that fits moved, or, below 0, the other one
    while (between := abs(fails - fits)) > 1:
        share = min(more / (more - less) for more, less in zip(has, lacks, strict=True) if less < 0)
        steps = int(share * between) if abs(in_a_row) < 2 else between // 2
        middle = fits + way * min(max(1, steps), between - 1)
        found = room(middle)
        if min(found) >= 0:
            fits, has, in_a_row = middle, found, max(in_a_row, 0) + 1
        else:
            fails, lacks, in_a_row = middle, found, min(in_a_row, 0) - 1
    return fits

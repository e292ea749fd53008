"""Waits: from reads and writes alone, the fewest cross-lane waits that keep the order the ops are listed in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megatrain.schedule.ops import Lane, Op, Place, Schedule

_LANES = {lane: number for number, lane in enumerate(Lane)}


class _Hazards:
    """Per place: its last write, and the last read on each lane, as indices of ops."""

    def __init__(self) -> None:
        self._writes: dict[Place, int] = {}
        self._reads: defaultdict[Place, dict[int, int]] = defaultdict(dict)

    def add(self, index: int, op: Op, lane: int) -> set[int]:
        """Ops that must be done before `op`: writers of what it reads, writers and readers of what it writes."""
        written = self._writes
        before = {written[place] for place in (*op.reads, *op.writes) if place in written}
        for place in op.writes:
            before.update(self._reads[place].values())
        for place in op.reads:
            self._reads[place][lane] = index
        for place in op.writes:
            written[place] = index  # earlier reads stay listed: this write implies them
        return before


def one_by_one(schedule: Schedule) -> Schedule:
    """`schedule` with every op waiting for the one listed before it: nothing overlaps, and nothing else changes."""
    tokens = [f"o{index}" for index in range(len(schedule))]
    return tuple(
        replace(op, waits=tuple(tokens[max(0, index - 1) : index]), records=tokens[index])
        for index, op in enumerate(schedule)
    )


def with_waits(ops: Sequence[Op]) -> Schedule:
    """`ops` with waits, and with tokens on those that are waited for. Any order of lanes then acts like the list.

    A wait is left out if the lane's own order or another wait implies it, so every wait that remains is needed.
    """
    hazards = _Hazards()
    position: list[int] = []  # position[i]: op i is the position[i]-th of its lane, counted from 1
    clocks: list[list[int]] = []  # clocks[i][lane]: how many ops of each lane are done once op i is done
    lane_clock = [[0] * len(_LANES) for _ in _LANES]
    waits: list[tuple[int, ...]] = []
    for index, op in enumerate(ops):
        own = _LANES[op.lane]
        clock = lane_clock[own].copy()
        chosen = []
        # Latest first: an op can only be implied by a later one, so what is chosen is never implied afterwards.
        for before in sorted(hazards.add(index, op, own), reverse=True):
            lane = _LANES[ops[before].lane]
            if lane == own or clock[lane] >= position[before]:
                continue
            chosen.append(before)
            clock = list(map(max, clock, clocks[before]))
        clock[own] += 1
        position.append(clock[own])
        clocks.append(clock)
        lane_clock[own] = clock
        waits.append(tuple(reversed(chosen)))
    tokens = {before: f"{ops[before].kind[0].lower()}{before}" for chosen_ in waits for before in chosen_}
    return tuple(
        Op(op.kind, op.segment, op.micro_batch, op.lane, op.reads, op.writes,
           tuple(tokens[before] for before in waits[index]), tokens.get(index))
        for index, op in enumerate(ops)
    )  # fmt: skip

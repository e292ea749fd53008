"""The chaos device: late lanes and poisoned memory. What survives it, with the same bits, has no race.

Every op may start late by a seeded random delay. A slot whose content nobody will read again is filled with NaN at
once, so a stale or early read shows in the result instead of passing by luck.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from megatrain.engine.executor import Handler
from megatrain.engine.lanes import LaneDevice, SlowLane, StreamLane, lane_devices
from megatrain.schedule.ops import Kind, Lane, Op, Place, Schedule

SLOT_POOLS = ("w", "g", "s", "act", "h", "dact", "attn", "land.w", "land.state", "land.grad")


def last_reads(schedule: Schedule) -> dict[int, tuple[Place, ...]]:
    """id(op) -> slots whose content `op` is the last to read, where all its readers run on one lane.

    (Readers on two lanes have no common last one in time, only in the list.)
    """
    readers: dict[Place, list[Op]] = defaultdict(list)
    found: dict[int, list[Place]] = defaultdict(list)

    def retire(place: Place) -> None:
        if readers[place] and len({op.lane for op in readers[place]}) == 1:
            found[id(readers[place][-1])].append(place)
        readers[place] = []

    for op in schedule:
        for place in op.writes:
            if place in op.reads:  # goes on with what is there
                readers[place] = []
            else:
                retire(place)
        for place in op.reads:
            if place.pool in SLOT_POOLS and place not in op.writes:
                readers[place].append(op)
    return {key: tuple(places) for key, places in found.items()}


class Chaos:
    """Seeded delays on every lane, and poison in every slot after its last read. One object serves one engine."""

    def __init__(self, seed: int, max_delay_s: float = 0.002) -> None:
        self._seed = seed
        self._max_delay_s = max_delay_s
        self._last_reads: Mapping[int, tuple[Place, ...]] = {}

    def lanes(self, device: torch.device) -> dict[Lane, LaneDevice]:
        """The lanes of `device`, each op of which may start late."""
        # Dice of its own for each lane: with one set for all, the order of threads would decide who gets which delay,
        # and a seed could not be played again.
        return {
            lane: SlowLane(inner, self._delay(inner, random.Random(f"{self._seed} {lane}")))
            for lane, inner in lane_devices(device).items()
        }

    def begin(self, schedule: Schedule) -> None:
        """Called before each program."""
        self._last_reads = last_reads(schedule)

    def table(self, table: Mapping[Kind, Handler], poison: Callable[[Place], None]) -> dict[Kind, Handler]:
        """`table`, with `poison` called for each place after its last read."""
        return {kind: self._poisoning(handler, poison) for kind, handler in table.items()}

    def _poisoning(self, handler: Handler, poison: Callable[[Place], None]) -> Handler:
        def run(op: Op) -> None:
            handler(op)
            for place in self._last_reads.get(id(op), ()):
                poison(place)

        return run

    def _delay(self, lane: LaneDevice, dice: random.Random) -> Callable[[], None]:
        def late_host() -> None:
            time.sleep(dice.random() * self._max_delay_s)

        def late_stream() -> None:
            torch.cuda._sleep(int(dice.random() * self._max_delay_s * 1.5e9))  # about 1.5 GHz

        return late_stream if isinstance(lane, StreamLane) else late_host

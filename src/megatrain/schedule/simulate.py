"""Simulate: a null device. Runs a schedule with given durations, in no time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatrain.schedule.ops import Lane, Op, Schedule

_LEAST_SHARE = 0.1  # of a resource, that uses which yield keep between them


class Use(NamedTuple):
    """Units a second of a shared resource that an op takes while it runs at full speed. A use that `yields` gets what
    the others leave: on host memory a processor's stores wait, a DMA engine's do not."""

    resource: str
    rate: float
    yields: bool = False


@dataclass(frozen=True)
class Sharing:
    """What ops share: the uses of each op, and the capacity of each resource in the same units."""

    uses: Callable[[Op], Sequence[Use]]
    capacity: Mapping[str, float]


@dataclass(frozen=True)
class Simulation:
    """When each op ran. `critical_path`: indices of ops that ran back to back and end with the last one to finish."""

    start_s: tuple[float, ...]
    finish_s: tuple[float, ...]
    busy_s: Mapping[Lane, float]
    makespan_s: float
    critical_path: tuple[int, ...]


class DeadlockError(Exception):
    """No lane can go on; the message says what each one waits for."""


@dataclass
class _Running:
    """An op in progress: what was left of it when its speed last changed."""

    index: int
    left_s: float  # at full speed
    since_s: float
    uses: Sequence[Use]
    speed: float = 1.0
    finish_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.finish_s = self.since_s + self.left_s

    def set_speed(self, speed: float, now_s: float) -> None:
        """Go on at another speed; an op whose speed stays the same keeps its exact finish."""
        if speed == self.speed:
            return
        self.left_s -= (now_s - self.since_s) * self.speed
        self.since_s, self.speed = now_s, speed
        self.finish_s = now_s + self.left_s / speed


def simulate(schedule: Schedule, seconds: Callable[[Op], float], sharing: Sharing | None = None) -> Simulation:
    """Every lane runs its ops in order, each as soon as the lane is free and its waits are over.

    `seconds`: of an op that has every resource to itself. Ops that run at one time and ask for more of a resource than
    there is all slow down, those that yield first.
    """
    return _Run(schedule, seconds, sharing).result()


class _Run:
    """One simulation in progress."""

    def __init__(self, schedule: Schedule, seconds: Callable[[Op], float], sharing: Sharing | None) -> None:
        self.schedule = schedule
        self.seconds = seconds
        self.sharing = sharing
        self.queues: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
        for index, op in enumerate(schedule):
            self.queues[op.lane].append(index)
        self.start_s, self.finish_s = [0.0] * len(schedule), [0.0] * len(schedule)
        self.binding: list[int | None] = [None] * len(schedule)  # the op whose end let this one start
        self.last: dict[Lane, int] = {}
        self.recorded: dict[str, int] = {}
        self.missing: dict[Lane, str] = {}
        self.running: dict[Lane, _Running] = {}
        self.now_s = 0.0

    def result(self) -> Simulation:
        """Run to the end."""
        while True:
            self._start_what_can()
            if not self.running:
                break
            self._share()
            self._finish_next()
        if any(self.queues.values()):
            raise DeadlockError(_stuck(self.schedule, self.queues, self.recorded))
        busy_s = dict.fromkeys(Lane, 0.0)
        for op, start_s, finish_s in zip(self.schedule, self.start_s, self.finish_s, strict=True):
            busy_s[op.lane] += finish_s - start_s
        return Simulation(tuple(self.start_s), tuple(self.finish_s), busy_s, self.now_s, self._critical_path())

    def _start_what_can(self) -> None:
        for lane, queue in self.queues.items():
            if not queue or lane in self.running or self._waits(lane):
                continue
            index = queue.popleft()
            op = self.schedule[index]
            causes = [self.recorded[token] for token in op.waits] + ([self.last[lane]] if lane in self.last else [])
            self.binding[index] = max(causes, key=self.finish_s.__getitem__, default=None)
            self.start_s[index] = self.now_s
            uses = self.sharing.uses(op) if self.sharing else ()
            self.running[lane] = _Running(index, self.seconds(op), self.now_s, uses)

    def _waits(self, lane: Lane) -> bool:
        """Whether the next op of a lane waits; the token that it was last found waiting for is looked at first."""
        if lane in self.missing and self.missing[lane] not in self.recorded:
            return True
        for token in self.schedule[self.queues[lane][0]].waits:
            if token not in self.recorded:
                self.missing[lane] = token
                return True
        return False

    def _finish_next(self) -> None:
        self.now_s = min(running.finish_s for running in self.running.values())
        for lane, running in list(self.running.items()):
            if running.finish_s <= self.now_s:
                del self.running[lane]
                self.finish_s[running.index] = self.now_s
                self.last[lane] = running.index
                token = self.schedule[running.index].records
                if token is not None:
                    self.recorded[token] = running.index

    def _share(self) -> None:
        """The speed of every op in progress, from what is asked of each resource now."""
        if self.sharing is None:
            return
        asked: dict[tuple[str, bool], float] = {}
        for running in self.running.values():
            for use in running.uses:
                key = use.resource, use.yields
                asked[key] = asked.get(key, 0.0) + use.rate
        share: dict[tuple[str, bool], float] = {}
        for (resource, yields), rate in asked.items():
            there = self.sharing.capacity[resource]
            if yields:
                there = max(there - asked.get((resource, False), 0.0), _LEAST_SHARE * there)
            share[resource, yields] = min(1.0, there / rate) if rate else 1.0
        for running in self.running.values():
            speed = min((share[use.resource, use.yields] for use in running.uses), default=1.0)
            running.set_speed(speed, self.now_s)

    def _critical_path(self) -> tuple[int, ...]:
        path = []
        index = max(range(len(self.schedule)), key=self.finish_s.__getitem__, default=None)
        while index is not None:
            path.append(index)
            index = self.binding[index]
        return tuple(reversed(path))


def _stuck(schedule: Schedule, queues: Mapping[Lane, deque[int]], recorded: Mapping[str, int]) -> str:
    lines = ["deadlock: no lane can go on"]
    for lane, queue in queues.items():
        if queue:
            op = schedule[queue[0]]
            missing = ", ".join(token for token in op.waits if token not in recorded)
            lines.append(f"  {lane}: op {queue[0]} ({op.kind} {op.segment or '-'}) waits for {missing}")
    return "\n".join(lines)

"""Simulate: a null device. Runs a schedule with given durations, in no time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
    """When each op ran, and how long it takes alone. `critical_path`: indices of ops that ran back to back and end with
    the last one to finish."""

    alone_s: tuple[float, ...]
    start_s: tuple[float, ...]
    finish_s: tuple[float, ...]
    busy_s: Mapping[Lane, float]
    makespan_s: float
    critical_path: tuple[int, ...]


class DeadlockError(Exception):
    """No lane can go on; the message says what each one waits for."""


@dataclass(slots=True)
class _Line:
    """A lane: ops to come, whether one is in progress, the last one that ended."""

    queue: deque[int]
    is_busy: bool = False
    last: int | None = None


@dataclass(slots=True)
class _Running:
    """An op in progress: what was left of it when its speed last changed."""

    index: int
    line: _Line
    left_s: float  # at full speed
    since_s: float
    speed: float = 1.0
    finish_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.finish_s = self.since_s + self.left_s

    def set_speed(self, speed: float, now_s: float) -> None:
        """Go on at another speed."""
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
        self.sharing = sharing
        self.alone_s = [seconds(op) for op in schedule]
        self.uses = [sharing.uses(op) if sharing else () for op in schedule]
        numbers: dict[Sequence[Use], int] = {}
        self.alike = [numbers.setdefault(uses, len(numbers)) for uses in self.uses]  # one number: the same uses
        self.lines = {lane: _Line(deque()) for lane in Lane}
        for index, op in enumerate(schedule):
            self.lines[op.lane].queue.append(index)
        recorded = {op.records: index for index, op in enumerate(schedule) if op.records is not None}
        self.waits = [[recorded.get(token, -1) for token in op.waits] for op in schedule]  # -1: nobody records it
        self.start_s, self.finish_s = [0.0] * len(schedule), [0.0] * len(schedule)
        self.binding: list[int | None] = [None] * len(schedule)  # the op whose end let this one start
        self.is_done = [False] * len(schedule) + [False]
        self.may_start = list(self.lines.values())  # lanes that something happened to
        self.waiting: dict[int, list[_Line]] = {}  # an op -> lanes whose next op was last found waiting for it
        self.running: list[_Running] = []
        self.speeds: dict[tuple[int, ...], list[float]] = {}  # of ops that ran at one time
        self.now_s = 0.0

    def result(self) -> Simulation:
        """Run to the end."""
        while self._starts_what_can():
            if self.sharing:
                self._share(self.sharing)
            self._finish_next()
        if any(line.queue for line in self.lines.values()):
            raise DeadlockError(self._stuck())
        busy_s = dict.fromkeys(Lane, 0.0)
        for op, start_s, finish_s in zip(self.schedule, self.start_s, self.finish_s, strict=True):
            busy_s[op.lane] += finish_s - start_s
        start_s, finish_s = tuple(self.start_s), tuple(self.finish_s)
        return Simulation(tuple(self.alone_s), start_s, finish_s, busy_s, self.now_s, self._critical_path())

    def _starts_what_can(self) -> bool:
        """Whether anything runs now."""
        for line in self.may_start:
            if line.is_busy or not line.queue:
                continue
            index = line.queue[0]
            causes = self.waits[index]
            missing = next((cause for cause in causes if not self.is_done[cause]), None)
            if missing is not None:
                self.waiting.setdefault(missing, []).append(line)
                continue
            line.queue.popleft()
            line.is_busy = True
            if line.last is not None:
                causes = [*causes, line.last]
            self.binding[index] = max(causes, key=self.finish_s.__getitem__, default=None)
            self.start_s[index] = self.now_s
            self.running.append(_Running(index, line, self.alone_s[index], self.now_s))
        return bool(self.running)

    def _finish_next(self) -> None:
        self.now_s = now_s = min([running.finish_s for running in self.running])
        self.may_start = []
        for running in self.running:
            if running.finish_s <= now_s:
                index, line = running.index, running.line
                line.is_busy, line.last = False, index
                self.finish_s[index], self.is_done[index] = now_s, True
                self.may_start += [line, *self.waiting.pop(index, ())]
        self.running = [running for running in self.running if running.finish_s > now_s]

    def _share(self, sharing: Sharing) -> None:
        """The speed of every op in progress; one whose speed stays the same keeps its exact finish."""
        together = tuple([self.alike[running.index] for running in self.running])
        if together not in self.speeds:
            self.speeds[together] = _speeds([self.uses[running.index] for running in self.running], sharing.capacity)
        for running, speed in zip(self.running, self.speeds[together], strict=True):
            if speed != running.speed:
                running.set_speed(speed, self.now_s)

    def _critical_path(self) -> tuple[int, ...]:
        path = []
        index = max(range(len(self.schedule)), key=self.finish_s.__getitem__, default=None)
        while index is not None:
            path.append(index)
            index = self.binding[index]
        return tuple(reversed(path))

    def _stuck(self) -> str:
        lines = ["deadlock: no lane can go on"]
        for lane, line in self.lines.items():
            if line.queue:
                op = self.schedule[line.queue[0]]
                causes = zip(op.waits, self.waits[line.queue[0]], strict=True)
                missing = ", ".join(token for token, cause in causes if not self.is_done[cause])
                lines.append(f"  {lane}: op {line.queue[0]} ({op.kind} {op.segment or '-'}) waits for {missing}")
        return "\n".join(lines)


def _speeds(together: Sequence[Sequence[Use]], capacity: Mapping[str, float]) -> list[float]:
    """Of ops that run at one time, from what is asked of each resource."""
    asked: dict[tuple[str, bool], float] = {}
    for use in chain.from_iterable(together):
        key = use.resource, use.yields
        asked[key] = asked.get(key, 0.0) + use.rate
    share: dict[tuple[str, bool], float] = {}
    for (resource, yields), rate in asked.items():
        there = capacity[resource]
        if yields:
            there = max(there - asked.get((resource, False), 0.0), _LEAST_SHARE * there)
        share[resource, yields] = min(1.0, there / rate) if rate else 1.0
    return [min((share[use.resource, use.yields] for use in uses), default=1.0) for uses in together]

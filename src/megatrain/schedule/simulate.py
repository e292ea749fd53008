"""Simulate: a null device. Runs a schedule with given durations, in no time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatrain.schedule.ops import Lane, Op, Schedule


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


def simulate(schedule: Schedule, seconds: Callable[[Op], float]) -> Simulation:
    """Every lane runs its ops in order, each as soon as the lane is free and its waits are over."""
    queues: dict[Lane, deque[int]] = {lane: deque() for lane in Lane}
    for index, op in enumerate(schedule):
        queues[op.lane].append(index)
    start_s, finish_s = [0.0] * len(schedule), [0.0] * len(schedule)
    binding: list[int | None] = [None] * len(schedule)  # the op whose end let this one start
    last: dict[Lane, int] = {}
    recorded: dict[str, int] = {}
    busy_s = dict.fromkeys(Lane, 0.0)
    remaining = len(schedule)
    while remaining:
        before = remaining
        for lane, queue in queues.items():
            while queue and all(token in recorded for token in schedule[queue[0]].waits):
                index = queue.popleft()
                op = schedule[index]
                causes = [recorded[token] for token in op.waits] + ([last[lane]] if lane in last else [])
                binding[index] = max(causes, key=finish_s.__getitem__, default=None)
                start_s[index] = 0.0 if binding[index] is None else finish_s[binding[index]]
                duration_s = seconds(op)
                finish_s[index] = start_s[index] + duration_s
                busy_s[lane] += duration_s
                last[lane] = index
                if op.records is not None:
                    recorded[op.records] = index
                remaining -= 1
        if remaining == before:
            raise DeadlockError(_stuck(schedule, queues, recorded))
    path = []
    index = max(range(len(schedule)), key=finish_s.__getitem__, default=None)
    makespan_s = 0.0 if index is None else finish_s[index]
    while index is not None:
        path.append(index)
        index = binding[index]
    return Simulation(tuple(start_s), tuple(finish_s), busy_s, makespan_s, tuple(reversed(path)))


def _stuck(schedule: Schedule, queues: Mapping[Lane, deque[int]], recorded: Mapping[str, int]) -> str:
    lines = ["deadlock: no lane can go on"]
    for lane, queue in queues.items():
        if queue:
            op = schedule[queue[0]]
            missing = ", ".join(token for token in op.waits if token not in recorded)
            lines.append(f"  {lane}: op {queue[0]} ({op.kind} {op.segment or '-'}) waits for {missing}")
    return "\n".join(lines)

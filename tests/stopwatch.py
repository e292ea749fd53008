"""Seconds of plain Python as a quiet core takes them, whatever other tests left and however busy the machine is."""

import gc
import time
from collections.abc import Callable

LOOP_S = 0.037  # of `_loop` on the core by which limits were set (AMD EPYC, Python 3.11), nothing else running


def _loop() -> int:
    """Dictionaries, tuples and strings, as a schedule and a search are made of."""
    seen: dict[tuple[str, int], int] = {}
    for number in range(60_000):
        key = (f"L{number % 180}", number & 15)
        seen[key] = seen.get(key, 0) + number
    return max(seen.values())


def _thread_s(call: Callable[[], object]) -> float:
    """This thread's time alone; without the collector, which would go through the objects of a thousand earlier tests
    (a build of 0.12 s was once 1.02 s behind 5,900 of them)."""
    gc.collect()
    gc.disable()
    try:
        started_s = time.thread_time()
        call()
        return time.thread_time() - started_s
    finally:
        gc.enable()


def quiet_s(call: Callable[[], object], limit_s: float, times: int = 5) -> float:
    """The least of a few calls, each over how much longer than `LOOP_S` the loop took; ends at one below the limit."""
    least_s = float("inf")
    for _ in range(times):
        before_s, call_s, behind_s = (_thread_s(what) for what in (_loop, call, _loop))
        least_s = min(least_s, call_s / max(1.0, min(before_s, behind_s) / LOOP_S))
        if least_s < limit_s:
            break
    return least_s

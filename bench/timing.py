"""Seconds of steps behind a warm-up, and peaks from a clean beginning."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatrain.memory import reset_peak_rss

LEAST_STEPS = 2


@dataclass(frozen=True)
class Pace:
    """How long steps are run."""

    warm_s: float  # the chip throttles in its first seconds
    steps: int
    most_s: float  # of timed steps, but for `least` of them
    least: int = LEAST_STEPS  # warm, and timed, however long one takes


def timed(step: Callable[[], object], pace: Pace, first: Callable[[], None]) -> tuple[float, ...]:
    """Seconds of steps behind a warm-up; `first` is called behind the first step of all."""
    step()
    synchronize()
    first()
    started, warm = time.perf_counter(), 1
    while warm < pace.least or time.perf_counter() - started < pace.warm_s:
        step()
        warm += 1
    synchronize()
    steps_s: list[float] = []
    while len(steps_s) < pace.least or (len(steps_s) < pace.steps and sum(steps_s) < pace.most_s):
        before = time.perf_counter()
        step()
        synchronize()
        steps_s.append(time.perf_counter() - before)
    return tuple(steps_s)


def fresh() -> None:
    """Nothing left of what was measured before, no cap, peaks from here."""
    empty_cache()
    reset_peak_rss()
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.reset_peak_memory_stats()


def empty_cache() -> None:
    """Give the pool's unused memory back, if there is a GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch._C._cuda_clearCublasWorkspaces()  # of streams that are gone: 32 MiB each
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()

"""Rates of the host's memory: a copy by all threads, and any update over spans. Torch-free."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

PIECE_BYTES = 4 << 20  # between two looks at the clock
SPAN_ELEMENTS = 1 << 24


def copy_Bps(num_bytes: int, threads: int, limit_s: float) -> float:
    """Bytes read plus bytes written a second, by up to `threads` threads over `num_bytes` in all.

    Each thread touches its own pages first: they lie on its NUMA node. `num_bytes` must be well above the caches.
    """
    threads = max(1, min(threads, num_bytes // (2 * PIECE_BYTES)))
    half_bytes = max(PIECE_BYTES, num_bytes // threads // 2 // PIECE_BYTES * PIECE_BYTES)
    with ThreadPoolExecutor(threads) as pool:
        pairs = list(pool.map(lambda _: _touched_pair(half_bytes), range(threads)))
        started = time.perf_counter()
        copied = sum(pool.map(lambda pair: _copy_until(pair[0], pair[1], started + limit_s), pairs))
        return 2 * copied / (time.perf_counter() - started)


def _touched_pair(num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    return np.full(num_bytes, 1, np.uint8), np.full(num_bytes, 2, np.uint8)


def _copy_until(source: np.ndarray, target: np.ndarray, deadline: float) -> int:
    copied = 0
    for start in itertools.cycle(range(0, source.size, PIECE_BYTES)):
        piece = source[start : start + PIECE_BYTES]
        target[start : start + PIECE_BYTES] = piece  # numpy lets other threads run meanwhile
        copied += piece.size
        if time.perf_counter() >= deadline:
            break
    return copied


def update_params_per_s(update: Callable[[slice], None], num_params: int, limit_s: float) -> float:
    """Parameters a second of `update`, called on span after span of `num_params` until the time is over."""
    spans = [slice(i, min(i + SPAN_ELEMENTS, num_params)) for i in range(0, num_params, SPAN_ELEMENTS)]
    update(spans[0])  # warms up
    done = 0
    started = time.perf_counter()
    for span in itertools.cycle(spans):
        update(span)
        done += span.stop - span.start
        if time.perf_counter() - started >= limit_s:
            break
    return done / (time.perf_counter() - started)

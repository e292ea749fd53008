"""Memory rates count what was really done, in the time it took."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain.hardware import dram
from megatrain.hardware.dram import copy_Bps, update_params_per_s


class Clock:
    """perf_counter that goes on by a fixed amount at each look."""

    def __init__(self, tick_s: float) -> None:
        self.now, self.tick_s = 0.0, tick_s

    def perf_counter(self) -> float:
        self.now += self.tick_s
        return self.now


def test_a_copy_is_plausible_here() -> None:
    assert 1e8 < copy_Bps(32 << 20, 2, 0.05) < 1e13


def test_a_copy_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0)
    monkeypatch.setattr(dram, "time", clock)
    # looks: start 1, after each piece 2, 3, 4 (deadline 4), end 5: three pieces in four seconds
    assert copy_Bps(2 * dram.PIECE_BYTES, 1, 3.0) == 2 * 3 * dram.PIECE_BYTES / 4


def test_many_threads_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def pair(num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        taken.append(2 * num_bytes)
        return np.zeros(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

    monkeypatch.setattr(dram, "_touched_pair", pair)
    copy_Bps(32 << 20, 128, 0.0)
    assert 0 < sum(taken) <= 32 << 20


def test_an_update_counts_the_parameters_of_every_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram, "time", Clock(1.0))
    monkeypatch.setattr(dram, "SPAN_ELEMENTS", 10)
    spans: list[slice] = []
    # looks: start 1, then one after each span; 4 - 1 >= 3 ends it, and the last look gives four seconds
    assert update_params_per_s(spans.append, 25, 3.0) == 25 / 4
    assert spans == [slice(0, 10), slice(0, 10), slice(10, 20), slice(20, 25)]

"""The measured peak of matrix products, which MFU refers to."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatrain.hardware import probe
from megatrain.hardware.probe import PEAK_PRODUCTS, matmul_flops_per_s


def test_the_peak_is_the_best_of_all_products_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine most products wait for a core; one that did not is the machine's peak."""
    assert list(PEAK_PRODUCTS["cpu"].items()) == [(768, 4), (384, 32)]
    for fast, size in ((2, 768), (20, 384)):
        seconds = [5.0] * 36
        seconds[fast] = 0.001
        marks_s = itertools.accumulate(part for took_s in seconds for part in (1.0, took_s))  # start, end, start, …
        monkeypatch.setattr(probe.time, "perf_counter", lambda marks_s=marks_s: next(marks_s))
        assert matmul_flops_per_s(torch.device("cpu"), torch.float32) == pytest.approx(2 * size**3 / 0.001)

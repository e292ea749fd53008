"""Inputs that find rounding mistakes, and the comparison of bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatrain.optim import native
from megatrain.optim.spec import F32

ISAS = [native.NUMPY, *native.isas()]

SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e30, -1e30, 3.4028235e38, 1.1754944e-38, 1e-40, -1e-45, 1e-20],
    np.float32,
)


def same_bits(actual: NDArray, expected: NDArray) -> None:
    """Equal bits everywhere; two NaNs count as equal whatever their payload."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    size = f"u{actual.dtype.itemsize}"
    differs = actual.view(size) != expected.view(size)
    if actual.dtype.kind == "f":
        differs &= ~(np.isnan(actual) & np.isnan(expected))
    assert not differs.any(), f"{differs.sum()} of {differs.size} differ, first at {np.flatnonzero(differs)[:5]}"


def training_state(count: int, seed: int = 0) -> tuple[F32, F32, F32, F32]:
    """w, m, v, grad as in the middle of a run, magnitudes spread over six decades."""
    rng = np.random.default_rng(seed)
    scale = np.float32(10.0) ** rng.uniform(-5, 1, count).astype(np.float32)
    w, m, grad = (rng.standard_normal(count, np.float32) * scale for _ in range(3))
    return w, m, np.square(rng.standard_normal(count, np.float32) * scale), grad


def special_state(count: int, seed: int = 0) -> tuple[F32, F32, F32, F32]:
    """w, m, v, grad drawn from the special values; v is never negative."""
    rng = np.random.default_rng(seed)
    w, m, v, grad = (rng.choice(SPECIAL, count) for _ in range(4))
    return w, m, np.abs(v), grad


def at_offset(array: NDArray, offset: int) -> NDArray:
    """A copy of `array` that starts `offset` elements into its buffer, guarded by seven elements behind."""
    buffer = np.zeros(array.size + offset + 7, array.dtype)
    view = buffer[offset : offset + array.size]
    view[:] = array
    return view

"""More than 2^31 elements on a small machine: one window of memory, mapped again and again, stands for a long array."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import pytest

from megatrain import optim
from megatrain.optim import native
from tests.optim.values import same_bits, training_state

WINDOW = 1 << 22  # elements
NUM_WINDOWS = 513  # 513 * 2^22 > 2^31
HYPER = optim.AdamW(learning_rate=3e-4, weight_decay=0.1)
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # Linux

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.isas(), reason="needs the C++ core to finish in minutes"),
]


@pytest.fixture
def aliased():
    """A function: array -> (a window holding it, a view of NUM_WINDOWS windows on its bytes, 5 elements short)."""
    mapped = []

    def alias(array):
        window_bytes = array.nbytes
        file = os.memfd_create("window")
        os.ftruncate(file, window_bytes)
        base = mmap.mmap(-1, window_bytes * NUM_WINDOWS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        whole = np.frombuffer(base, array.dtype)
        for i in range(NUM_WINDOWS):
            address = whole.ctypes.data + i * window_bytes
            prot = mmap.PROT_READ | mmap.PROT_WRITE
            got = LIBC.mmap(address, window_bytes, prot, mmap.MAP_SHARED | MAP_FIXED, file, 0)
            assert got == address, os.strerror(ctypes.get_errno())
        os.close(file)
        mapped.append(base)
        whole[:WINDOW] = array
        return whole[:WINDOW], whole[:-5]

    return alias


def test_updates_beyond_two_to_the_31_elements(aliased):
    """One update of the long array is NUM_WINDOWS updates of the window; its last five elements miss the last one."""
    state = training_state(WINDOW)
    scalars = optim.scalars(HYPER, 9, 1.0)
    windows, longs = zip(*(aliased(a) for a in state), strict=True)
    assert longs[0].size > 2**31
    optim.update_fp32(*longs, scalars, decay=True, threads=1)
    expected = [a.copy() for a in state]
    for i in range(NUM_WINDOWS):
        cut = slice(None, -5 if i == NUM_WINDOWS - 1 else None)
        optim.update_fp32(*(a[cut] for a in expected), scalars, decay=True, threads=1)
    for actual, want in zip(windows, expected, strict=True):
        same_bits(actual, want)


def test_split_updates_beyond_two_to_the_31_elements(aliased):
    w, m, v, grad = training_state(WINDOW)
    state = (*optim.split(w), m, v, grad)
    scalars = optim.scalars(HYPER, 9, 1.0)
    windows, longs = zip(*(aliased(a) for a in state), strict=True)
    optim.update_split(*longs, scalars, decay=True, threads=1)
    expected = [a.copy() for a in state]
    for i in range(NUM_WINDOWS):
        cut = slice(None, -5 if i == NUM_WINDOWS - 1 else None)
        optim.update_split(*(a[cut] for a in expected), scalars, decay=True, threads=1)
    for actual, want in zip(windows, expected, strict=True):
        same_bits(actual, want)


def test_the_norm_beyond_two_to_the_31_elements(aliased):
    """Whole windows as leaves: every leaf has the same sum."""
    window, longer = aliased(training_state(WINDOW)[3])
    leaf_sum = optim.tensor_sum_squares(window.reshape(1, -1))
    leaves = longer[: 512 * WINDOW]
    assert leaves.size == 2**31
    assert optim.tensor_sum_squares(leaves.reshape(512, -1), 2) == pytest.approx(512 * leaf_sum, rel=1e-13)
    # One leaf: 2^23 additions a lane, each rounded.
    assert optim.tensor_sum_squares(leaves.reshape(1, -1)) == pytest.approx(512 * leaf_sum, rel=1e-10)

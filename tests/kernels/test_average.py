"""The running average of the masters in torch equals optim.spec in every bit, on whatever device there is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatrain.kernels import average, average_
from megatrain.optim import spec
from tests.optim.values import same_bits, special_state, training_state

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHARE = spec.average_share(0.999)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("values", [training_state, special_state])
@pytest.mark.parametrize(("count", "threads"), [(0, 1), (1, 1), (3, 3), (999, 1), (1001, 2), (4097, 1), (9999, 3)])
def test_every_bit_is_the_specifications(monkeypatch, device, precision, values, count, threads):
    monkeypatch.setitem(average.CHUNK_ELEMENTS, device, 1000)
    w, ema, _, _ = values(count, seed=count)
    hi, lo = spec.split(w)
    if precision == "fp32":
        there, low = torch.from_numpy(w.copy()).to(device), None
    else:
        there = torch.from_numpy(hi.view(np.int16)).view(torch.bfloat16).to(device)
        low = torch.from_numpy(lo).to(device)
    found = torch.from_numpy(ema.copy()).to(device)
    average_(found, there, low, SHARE, threads=threads if device == "cpu" else 1)
    same_bits(found.cpu().numpy(), spec.average(ema, w, SHARE))
    if precision == "fp32":
        same_bits(there.cpu().numpy(), w)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_of_the_real_size_meet(device):
    w, ema, _, _ = training_state(average.CHUNK_ELEMENTS[device] + 5)
    found = torch.from_numpy(ema.copy()).to(device)
    average_(found, torch.from_numpy(w).to(device), None, SHARE)
    same_bits(found.cpu().numpy(), spec.average(ema, w, SHARE))


def test_each_operation_rounds_on_its_own():
    """One rounding fewer, by a fused multiply-add, gives other bits: these values would show it."""
    w, ema, _, _ = training_state(100_000)
    once = (ema.astype(np.float64) + (w - ema).astype(np.float64) * SHARE).astype(np.float32)
    assert np.any(once != spec.average(ema, w, SHARE))


def test_the_share_is_rounded_once():
    assert SHARE == float(np.float32(1.0 - 0.999)) != float(np.float32(1.0) - np.float32(0.999))
    for decay in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(ValueError, match="above 0 and below 1"):
            spec.average_share(decay)

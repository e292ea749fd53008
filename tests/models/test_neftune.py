"""The noise: uniform, of the right size, a function of its key alone."""

from __future__ import annotations

import math

import pytest
import torch

from megatrain.models import neftune
from megatrain.models.batch import TokenBatch
from megatrain.models.neftune import uniform, with_noise

CPU = torch.device("cpu")
PINNED = [-2558647, -4827393, -1604102, 1038695]  # of an independent form in Python's own integers


def batch_of(*lengths: int) -> TokenBatch:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    zeros = torch.zeros(len(ids), dtype=torch.int64)
    return TokenBatch(zeros, zeros, ids, zeros)


def test_numbers_are_uniform_and_unrelated() -> None:
    u = uniform(0, 1 << 18, 7, CPU).double()
    assert -1.0 <= float(u.min()) < -0.9999
    assert 0.9999 < float(u.max()) < 1.0
    assert abs(float(u.mean())) < 0.005
    assert float(u.var()) == pytest.approx(1 / 3, rel=0.01)
    for other in (u.roll(1), uniform(0, 1 << 18, 8, CPU).double(), uniform(0, 1 << 18, 7 + (1 << 32), CPU).double()):
        assert abs(float((u * other).mean())) < 0.005


def test_pinned_for_ever() -> None:
    """A resumed run draws the numbers of the run it goes on with, whatever the version of torch."""
    assert (uniform(0, 4, 1, CPU) * 2**23).long().tolist() == PINNED
    assert torch.equal(uniform(2, 2, 1, CPU), uniform(0, 4, 1, CPU)[2:])


def test_each_document_has_noise_of_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, hidden_size, alpha = batch_of(4, 25, 3), 16, 5.0
    h = torch.zeros(1, 32, hidden_size)
    noise = with_noise(h, batch, alpha, seed=3, step=2, micro_batch=1)[0]
    assert not h.any(), "the hidden state itself stays"
    start = 0
    for length in (4, 25, 3):
        most = alpha / math.sqrt(length * hidden_size)
        part = noise[start : start + length].abs()
        assert 0.9 * most < float(part.max()) <= most * (1 + 1e-6)
        start += length
    monkeypatch.setattr(neftune, "CHUNK_ELEMENTS", 3 * hidden_size)
    assert torch.equal(with_noise(h, batch, alpha, seed=3, step=2, micro_batch=1)[0], noise), "chunks change nothing"


@pytest.mark.parametrize("other", [(4, 2, 1), (3, 3, 1), (3, 2, 0)])
def test_seed_step_and_micro_batch_each_give_other_noise(other: tuple[int, int, int]) -> None:
    batch, h = batch_of(8), torch.zeros(1, 8, 4)
    assert not torch.equal(with_noise(h, batch, 5.0, 3, 2, 1), with_noise(h, batch, 5.0, *other))


def test_noise_is_rounded_once_before_it_is_added() -> None:
    batch = batch_of(8)
    h = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    noise = with_noise(torch.zeros(1, 8, 4), batch, 5.0, 3, 2, 1).bfloat16()
    assert torch.equal(with_noise(h, batch, 5.0, 3, 2, 1), h + noise)

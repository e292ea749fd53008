"""`repeat_bits` sets what the framework needs to repeat its sums, and nothing on the way."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic as filling

from megatrain.models.determinism import REPEATS_ANYWAY, repeat_bits


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with warnings.catch_warnings():
        yield
    torch.use_deterministic_algorithms(False)
    filling.fill_uninitialized_memory = True
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_wanted_and_not_wanted():
    repeat_bits(True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not filling.fill_uninitialized_memory, "a pass over every new tensor"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    repeat_bits(False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_setting_of_the_users_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    repeat_bits(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_only_kernels_that_repeat_anyway_are_not_warned_of():
    repeat_bits(True)
    with pytest.warns(UserWarning, match="scatter_kernel"):
        warnings.warn("scatter_kernel does not have a deterministic implementation", UserWarning, stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        repeat_bits(True)
        for kernel in REPEATS_ANYWAY:
            warnings.warn(f"{kernel} does not have a deterministic implementation, but", UserWarning, stacklevel=1)

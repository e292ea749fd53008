"""`deterministic: true` repeats every bit, kernel by kernel; `false` gives up those of attention's backward, little."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.spread import family_row, gradients, kernel_rows, kernels, spread_of

OF_THE_FRAMEWORK, OF_FAST = "framework: ", "fast: "
CPU = torch.device("cpu")


@pytest.mark.gpu
def test_our_kernels_repeat_and_fast_attention_varies_little() -> None:
    rows = {row["kernel"]: row for row in kernel_rows(torch.device("cuda"), 4096)}
    for name, row in rows.items():
        if name.startswith(OF_FAST):
            assert row["spread"] < 0.05, row
        elif not name.startswith(OF_THE_FRAMEWORK):
            assert row["distinct"] == 1, row


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "falcon_h1", "gpt2", "granitemoe", "youtu"]
)
def test_gradients_of_whole_models_repeat(family: str) -> None:
    row = family_row(family, True, torch.device("cuda"), 1024, 4)
    assert row.get("distinct") == 1, row


def test_the_measure_sees_what_varies() -> None:
    same, other = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, 1.5])
    assert spread_of([[same], [same], [same.clone()]]) == (1, 0.0)
    assert spread_of([[same], [other], [other]]) == (2, 0.5)
    assert spread_of([[other, same], [other, same], [other, other]])[0] == 2


def test_on_a_cpu_all_repeats_and_suspects_are_seen() -> None:
    rows = list(kernel_rows(CPU, 64))
    assert len(rows) == len(kernels(CPU, 64))
    assert all(row["distinct"] == 1 for row in rows)
    passes, suspects = gradients("mixtral", True, CPU, 64, 2)
    assert all(torch.equal(passes[0][name], passes[1][name]) for name in passes[0])
    assert "embedding_dense_backward" in suspects

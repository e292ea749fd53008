"""Tiny configurations of every proven family, deterministic weights and batches for them. Shared by all tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from megatrain.models.batch import TokenBatch
from megatrain.models.spec import ModelSpec
from megatrain.models.template import ModelTemplate
from tests.families_dense import DENSE
from tests.families_hybrid import HYBRID
from tests.families_moe import MOE
from tests.family_cases import Case

# Every case of a family; those whose model type the installed transformers does not know are left out.
CASES: dict[str, Case] = {n: c for n, c in (DENSE | MOE | HYBRID).items() if c.model_type in CONFIG_MAPPING}
# Six that between them have most of what is special: for tests about other things than the family.
FAMILIES = ("llama", "smollm2", "qwen2", "qwen3", "mistral", "gemma3")


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A fresh configuration of `family`: hidden 64, vocabulary 96, 2 to 4 layers, windows of 8."""
    return CASES[family].config(**changes)


def mostly_slow(cases: Sequence[str], *quick: str) -> list[Any]:
    """`cases` as parameters of a test, all but `quick` marked slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def tiny_buffers(template: ModelTemplate, seed: int = 0) -> dict[str, torch.Tensor]:
    """Values for the buffers that a checkpoint holds, by checkpoint name: alive."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (buffer.cpu() + 0.1 * torch.randn(buffer.shape, generator=generator)).to(buffer.dtype)
        for name, buffer in template.saved_buffers.items()
    }


def tiny_masters(spec: ModelSpec, seed: int = 0) -> dict[str, np.ndarray]:
    """fp32 master weights by checkpoint name: matrices of scale 1/sqrt(columns), norms and biases alive."""
    rng = np.random.default_rng(seed)
    masters = {}
    for tensor in (t for s in spec.segments for t in s.tensors):
        scale = tensor.shape[-1] ** -0.5 if len(tensor.shape) > 1 else 0.3
        offset = 1.0 if "norm" in tensor.name else 0.0
        masters[tensor.name] = (offset + scale * rng.standard_normal(tensor.shape)).astype(np.float32)
    return masters


def tiny_batch(lengths: Sequence[int], seed: int = 0, vocab_size: int = 96, ignored: float = 0.2) -> TokenBatch:
    """Documents of `lengths` tokens packed end to end; the last token of each, and a share `ignored`, has no label."""
    rng = np.random.default_rng(seed)
    ids, positions, documents, labels = [], [], [], []
    for number, length in enumerate(lengths):
        tokens = rng.integers(3, vocab_size, length)
        targets = np.append(tokens[1:], -100)
        targets[rng.random(length) < ignored] = -100
        ids.append(tokens)
        positions.append(np.arange(length))
        documents.append(np.full(length, number))
        labels.append(targets)

    def tensor(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(dtype)

    return TokenBatch(
        tensor(ids, torch.int64),
        tensor(positions, torch.int64),
        tensor(documents, torch.int32),
        tensor(labels, torch.int64),
    )

"""Tiny configurations of every proven family, deterministic weights and batches for them. Shared by all tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from megatrain.models.batch import TokenBatch
from megatrain.models.spec import ModelSpec

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama() -> PreTrainedConfig:
    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    return LlamaConfig(**_SIZES, num_hidden_layers=3, rope_parameters=rope, tie_word_embeddings=False)


def _smollm2() -> PreTrainedConfig:
    return LlamaConfig(**_SIZES, num_hidden_layers=2, tie_word_embeddings=True)


def _qwen2() -> PreTrainedConfig:
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return Qwen2Config(**_SIZES, num_hidden_layers=3, tie_word_embeddings=False, **window)


def _qwen3() -> PreTrainedConfig:
    return Qwen3Config(**_SIZES, num_hidden_layers=2, head_dim=32, tie_word_embeddings=True)


def _mistral() -> PreTrainedConfig:
    return MistralConfig(**_SIZES, num_hidden_layers=2, sliding_window=8, tie_word_embeddings=False)


def _gemma3() -> PreTrainedConfig:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    scales = {"query_pre_attn_scalar": 24, "final_logit_softcapping": 4.0, "sliding_window": 8}
    return Gemma3TextConfig(**_SIZES, num_hidden_layers=3, head_dim=16, layer_types=types, **scales)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "smollm2": _smollm2,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
}


def tiny_config(family: str) -> PreTrainedConfig:
    """A fresh configuration of `family`: hidden 64, vocabulary 96, 2 or 3 layers, windows of 8."""
    return FAMILIES[family]()


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

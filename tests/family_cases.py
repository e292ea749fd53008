"""A tiny configuration as data: a model type of transformers, its settings, and what switches each feature off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_SHARED = {"vocab_size": 96, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def rope(kind: str = "default", **settings: Any) -> dict[str, Any]:
    """Rotary settings with the usual base."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


@dataclass(frozen=True)
class Case:
    """`features`: what is special -> settings that switch it off, and so must change the logits."""

    model_type: str
    settings: Mapping[str, Any]
    features: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    plain_sizes: bool = True  # the family spells its sizes as most do

    def config(self, **changes: Any) -> PreTrainedConfig:
        """A fresh configuration."""
        sizes = _SIZES if self.plain_sizes else {}
        return CONFIG_MAPPING[self.model_type](**(_SHARED | sizes | dict(self.settings) | changes))

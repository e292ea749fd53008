"""Padding changes no real token: neither through attention nor through positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from megatrain.data.batches import MicroBatch, _Assembler, _Pieces
from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from tests.families import tiny_config, tiny_masters


class Tokens:
    """Stands for a dataset of one sample of 16 tokens."""

    pad_id = 0
    tokens = np.arange(3, 19, dtype=np.uint16)

    def trained(self, start: int, stop: int) -> np.ndarray:
        return np.ones(stop - start, dtype=bool)


def micro_batch(size: int) -> MicroBatch:
    one = np.zeros(1, dtype=np.int64)
    pieces = _Pieces((Tokens(),), one, one, np.array([16]), one)
    (batch,) = _Assembler(pieces, size).micro_batches([np.array([0])])
    return batch


def hidden(config, batch: MicroBatch) -> np.ndarray:
    template = ModelTemplate(config, torch.device("cpu"), torch.float32)
    masters = tiny_masters(model_spec(config))
    weights = [{t.local: torch.from_numpy(masters[t.name]) for t in s.tensors} for s in template.spec.segments]
    fields = (batch.input_ids_T, batch.position_ids_T, batch.document_ids_T, batch.labels_T)
    h, calls = template.embed(weights[0], TokenBatch(*map(torch.from_numpy, fields)))
    for index, w in enumerate(weights[1:-1]):
        h = template.block(index, w, h, calls)
    return h.detach()[0, :16].numpy()


def dynamic_rotary() -> LlamaConfig:
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return LlamaConfig(**sizes, **heads, rope_parameters=rope)


@pytest.mark.parametrize(
    "config", [tiny_config("llama"), tiny_config("gpt2"), dynamic_rotary()], ids=["llama", "gpt2", "dynamic"]
)
def test_padding_changes_no_real_token(config):
    padded, exact = hidden(config, micro_batch(192)), hidden(config, micro_batch(16))
    np.testing.assert_allclose(padded, exact, rtol=0, atol=1e-5)

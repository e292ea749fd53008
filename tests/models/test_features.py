"""Features that no setting switches: the scale of an embedding, a head that reads it, correction of scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from megatrain.models.template import ModelTemplate
from tests.families import tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits

BATCH = tiny_batch([20, 12, 5])
Masters = dict[str, np.ndarray]


def logits_of(config: PreTrainedConfig, masters: Masters) -> Tensor:
    template = ModelTemplate(config, torch.device("cpu"), torch.float32)
    return streamed_logits(template, Homes(template, masters, "fp32"), BATCH)


def test_gemma_scales_its_embedding() -> None:
    template = ModelTemplate(tiny_config("gemma3"), torch.device("cpu"), torch.float32)
    homes = Homes(template, tiny_masters(template.spec), "fp32")
    h, _ = template.embed(homes.own("EMBED"), BATCH)
    rows = homes.own("EMBED")["embed_tokens.weight"][BATCH.input_ids_T]
    assert torch.equal(h[0], rows * 8.0)  # sqrt(64)


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "gemma3"])
def test_tied_head_reads_the_embedding(family: str) -> None:
    """A row of the embedding that no input uses changes that token's logit, and no other."""
    config = tiny_config(family)
    masters = tiny_masters(ModelTemplate(config, torch.device("cpu"), torch.float32).spec)
    changed = masters["model.embed_tokens.weight"].copy()
    changed[0] *= 2  # token 0 is in no tiny batch
    before, after = logits_of(config, masters), logits_of(config, masters | {"model.embed_tokens.weight": changed})
    assert not torch.equal(before[..., 0], after[..., 0])
    assert torch.equal(before[..., 1:], after[..., 1:])


@pytest.mark.parametrize("case", ["deepseek_v3", "minimax_m2", "ernie4_5_moe", "afmoe"])
def test_saved_buffers_reach_the_router(case: str) -> None:
    """Score corrections are saved buffers, of their own dtype; other values choose other experts."""
    template = ModelTemplate(tiny_config(case), torch.device("cpu"), torch.bfloat16)
    homes = Homes(template, tiny_masters(template.spec), "bf16")
    assert template.saved_buffers
    if case != "minimax_m2":  # the others insist on fp32
        assert {buffer.dtype for buffer in template.saved_buffers.values()} == {torch.float32}
    assert not template.saved_buffers.keys() & {t.name for s in template.spec.segments for t in s.tensors}
    before = streamed_logits(template, homes, BATCH)
    for buffer in template.saved_buffers.values():
        buffer.flatten()[0] += 4.0
    assert not torch.equal(before, streamed_logits(template, homes, BATCH))

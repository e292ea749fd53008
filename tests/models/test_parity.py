"""Contracts A1, A2, A8 beyond the families: other attention code, the loss, evaluation, frozen tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatrain.models.loss import head_loss
from megatrain.models.template import OUTPUT_WEIGHT, ModelTemplate
from tests import reference
from tests.families import FAMILIES, tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits, streamed_step
from tests.models.test_families import setting, whole_logits

CPU = torch.device("cpu")
CHUNK_TOKENS = 16
BATCHES = (tiny_batch([20, 12, 5], seed=0), tiny_batch([7, 30], seed=1))

each_family = pytest.mark.parametrize("family", FAMILIES)


@each_family
def test_streamed_logits_under_the_frameworks_attention(family: str) -> None:
    """Masks that the model's own code builds (here T x T) reach the layers through the recorded calls."""
    template = ModelTemplate(tiny_config(family), CPU, torch.float32, attn_implementation="sdpa")
    it = setting(family, "fp32", "sdpa")
    logits = streamed_logits(template, it.homes("fp32"), BATCHES[0])
    ids, positions = BATCHES[0].input_ids_T[None], BATCHES[0].position_ids_T[None]
    assert torch.equal(logits, it.whole.model(input_ids=ids, position_ids=positions, use_cache=False).logits)


def test_chunked_loss_is_the_frameworks_cross_entropy() -> None:
    """The shared loss against an independent one: whole logits, plain autograd. Close, not bit-equal."""
    it = setting("llama", "fp32")
    homes = it.homes("fp32")
    num_labels = int((BATCHES[0].labels_T >= 0).sum())
    loss = streamed_step(it.template, homes, BATCHES[:1], 1.0 / num_labels, CHUNK_TOKENS, keep=False)
    expected = nn.functional.cross_entropy(whole_logits(it.whole, BATCHES[0])[0], BATCHES[0].labels_T)
    names, parameters = zip(*it.whole.model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(expected, parameters)
    assert loss / num_labels == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, gradient in zip(names, gradients, strict=True):
        torch.testing.assert_close(homes.gradients()[name], gradient, rtol=1e-5, atol=1e-6)


@each_family
def test_evaluation_loss_is_the_training_loss(family: str) -> None:
    template = ModelTemplate(tiny_config(family), CPU, torch.float32)
    homes = Homes(template, tiny_masters(template.spec), "fp32")
    trained = streamed_step(template, homes, BATCHES[:1], 1.0, CHUNK_TOKENS, keep=False)
    h, calls = template.embed(homes.own("EMBED"), BATCHES[0])
    for index, block in enumerate(template.spec.blocks):
        h = template.block(index, homes.fetch(block.name, index % 2), h, calls)
    assert float(head_loss(template, homes.own("HEAD"), h, BATCHES[0].labels_T, CHUNK_TOKENS)) == trained


@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
@pytest.mark.parametrize("family", ["llama", "smollm2"])
def test_frozen_tensors_get_no_gradient_and_change_no_other(family: str, keep: bool) -> None:
    freeze = [r"layers\.0\.", "embed_tokens", "q_proj", r"model\.norm"]
    free, frozen = (ModelTemplate(tiny_config(family), CPU, torch.bfloat16, freeze=f) for f in ((), freeze))
    masters = tiny_masters(free.spec)
    sums = []
    for template in (free, frozen):
        homes = Homes(template, masters, "bf16")
        streamed_step(template, homes, BATCHES, 0.01, CHUNK_TOKENS, keep)
        sums.append(homes.gradients())
    assert 0 < len(sums[1]) < len(sums[0])
    assert reference.EMBEDDING not in sums[1]
    assert (OUTPUT_WEIGHT in sums[1]) == (family == "llama")
    for name, total in sums[1].items():
        assert torch.equal(total, sums[0][name]), name

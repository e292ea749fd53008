"""Contracts A1, A2, A8: streamed logits and gradients equal the whole model's, bit for bit, for every family."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from megatrain.models.batch import TokenBatch
from megatrain.models.loss import head_loss
from megatrain.models.recorders import GivenBackbone
from megatrain.models.template import OUTPUT_WEIGHT, ModelTemplate
from tests.families import FAMILIES, tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits, streamed_step
from tests.reference import EMBEDDING, OUTPUT, add_gradients, compute_weight

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHUNK_TOKENS = 16
BATCHES = (tiny_batch([20, 12, 5], seed=0), tiny_batch([7, 30], seed=1))

each_family = pytest.mark.parametrize("family", FAMILIES)
each_precision = pytest.mark.parametrize("precision", DTYPES)


def real_model(family: str, masters: dict, precision: str, attention: str = "megatrain") -> nn.Module:
    """The family's model with a separate output matrix, which holds the embedding if the family ties them."""
    config = tiny_config(family)
    tied, config.tie_word_embeddings = config.tie_word_embeddings, False
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[precision], attn_implementation=attention).eval()
    weights = {name: compute_weight(master, precision) for name, master in masters.items()}
    if tied:
        weights[OUTPUT] = weights[EMBEDDING]
    model.load_state_dict(weights, strict=True)
    return model


def whole_logits(model: nn.Module, batch: TokenBatch, mask: bool = True) -> torch.Tensor:
    documents = batch.document_ids_T.view(1, 1, 1, -1) if mask else None
    ids, positions = batch.input_ids_T[None], batch.position_ids_T[None]
    return model(input_ids=ids, position_ids=positions, attention_mask=documents, use_cache=False).logits


@each_family
@each_precision
def test_streamed_logits_are_the_models_own(family: str, precision: str) -> None:
    template = ModelTemplate(tiny_config(family), CPU, DTYPES[precision])
    masters = tiny_masters(template.spec)
    model = real_model(family, masters, precision)
    for batch in BATCHES:
        logits = streamed_logits(template, Homes(template, masters, precision), batch)
        assert logits.dtype == DTYPES[precision]
        assert torch.equal(logits, whole_logits(model, batch))


@each_family
def test_streamed_logits_under_the_frameworks_attention(family: str) -> None:
    """Masks that the model's own code builds (here T x T) reach the layers through the recorded calls."""
    template = ModelTemplate(tiny_config(family), CPU, torch.float32, attn_implementation="sdpa")
    masters = tiny_masters(template.spec)
    model = real_model(family, masters, "fp32", attention="sdpa")
    logits = streamed_logits(template, Homes(template, masters, "fp32"), BATCHES[0])
    assert torch.equal(logits, whole_logits(model, BATCHES[0], mask=False))


@each_family
@each_precision
@pytest.mark.parametrize("keep", [False, True], ids=["recompute", "keep"])
def test_streamed_gradients_are_whole_model_autograd(family: str, precision: str, keep: bool) -> None:
    template = ModelTemplate(tiny_config(family), CPU, DTYPES[precision])
    masters = tiny_masters(template.spec)
    homes = Homes(template, masters, precision)
    scale = 1.0 / sum(int((b.labels_T >= 0).sum()) for b in BATCHES)
    loss = streamed_step(template, homes, BATCHES, scale, CHUNK_TOKENS, keep)

    model, output = real_model(family, masters, precision), real_model(family, masters, precision)
    output.model = GivenBackbone()
    sums = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    assert loss == sum(float(add_gradients(model, output, b, sums, scale, CHUNK_TOKENS)) for b in BATCHES)
    streamed = homes.gradients()
    assert streamed.keys() == sums.keys()
    for name, expected in sums.items():
        assert torch.equal(streamed[name], expected), name
        assert expected.abs().max() > 0, f"{name} has no gradient: the comparison says nothing"


def test_chunked_loss_is_the_frameworks_cross_entropy() -> None:
    """The shared loss against an independent one: whole logits, plain autograd. Close, not bit-equal."""
    template = ModelTemplate(tiny_config("llama"), CPU, torch.float32)
    masters = tiny_masters(template.spec)
    homes = Homes(template, masters, "fp32")
    num_labels = int((BATCHES[0].labels_T >= 0).sum())
    loss = streamed_step(template, homes, BATCHES[:1], 1.0 / num_labels, CHUNK_TOKENS, keep=False)
    model = real_model("llama", masters, "fp32")
    expected = nn.functional.cross_entropy(whole_logits(model, BATCHES[0])[0], BATCHES[0].labels_T)
    expected.backward()
    assert loss / num_labels == pytest.approx(float(expected.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(homes.gradients()[name], parameter.grad, rtol=1e-5, atol=1e-6)


@each_family
def test_evaluation_loss_is_the_training_loss(family: str) -> None:
    template = ModelTemplate(tiny_config(family), CPU, torch.float32)
    homes = Homes(template, tiny_masters(template.spec), "fp32")
    trained = streamed_step(template, homes, BATCHES[:1], 1.0, CHUNK_TOKENS, keep=False)
    h, calls = template.embed(homes.own("EMBED"), BATCHES[0])
    for index, block in enumerate(template.spec.blocks):
        h = template.block(index, homes.fetch(block.name, index % 2), h, calls)
    assert float(head_loss(template, homes.own("HEAD"), h, BATCHES[0].labels_T, CHUNK_TOKENS)) == trained


@each_family
def test_documents_of_a_pack_do_not_see_each_other(family: str) -> None:
    """Contract A9: other tokens in the first document leave the second one's logits as they were."""
    template = ModelTemplate(tiny_config(family), CPU, torch.float32)
    homes = Homes(template, tiny_masters(template.spec), "fp32")
    first = BATCHES[0]
    changed = first._replace(input_ids_T=torch.cat([(first.input_ids_T[:20] + 1) % 96, first.input_ids_T[20:]]))
    before, after = (streamed_logits(template, homes, batch) for batch in (first, changed))
    assert torch.equal(before[:, 20:], after[:, 20:])
    assert not torch.equal(before[:, 19], after[:, 19])


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
    assert EMBEDDING not in sums[1]
    assert (OUTPUT_WEIGHT in sums[1]) == (family == "llama")
    for name, total in sums[1].items():
        assert torch.equal(total, sums[0][name]), name

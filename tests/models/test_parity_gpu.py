"""Contracts A1 and A2 on a GPU, eager and compiled: streamed logits and gradients equal the whole model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.models.batch import TokenBatch
from megatrain.models.template import ModelTemplate
from tests import reference
from tests.families import CASES, FAMILIES, tiny_batch, tiny_buffers, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits, streamed_step
from tests.reference import EMBEDDING, OUTPUT, compute_weight

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
CHUNK_TOKENS = 512
SCALE = 1e-3


def batches() -> list[TokenBatch]:
    made = (tiny_batch([700, 300, 24], seed=0), tiny_batch([24, 1000], seed=1))
    return [TokenBatch(*(t.to(GPU) for t in batch)) for batch in made]


def whole(family: str, masters: dict, compiled: bool) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Logits of the first batch, the loss sum and the gradient sums, by the model itself."""
    config = tiny_config(family)
    run = reference.whole(config, torch.bfloat16, "megatrain", "cuda")
    weights = {name: compute_weight(master, "bf16") for name, master in masters.items()}
    tied = {OUTPUT: weights[EMBEDDING]} if config.tie_word_embeddings else {}
    reference.set_state(run.model, weights | tied, {})
    if compiled:
        for layer in run.model.model.layers:
            layer.compile(dynamic=False)
    sums = {name: torch.zeros(p.shape, device=GPU) for name, p in run.model.named_parameters()}
    loss = sum(float(reference.add_gradients(run, batch, sums, SCALE, CHUNK_TOKENS)) for batch in batches())
    first = batches()[0]
    documents = first.document_ids_T.view(1, 1, 1, -1)
    ids, positions = first.input_ids_T[None], first.position_ids_T[None]
    logits = run.model(input_ids=ids, position_ids=positions, attention_mask=documents, use_cache=False).logits
    return logits, loss, sums


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_equals_whole_model(family: str, compiled: bool) -> None:
    torch._dynamo.reset()
    template = ModelTemplate(tiny_config(family), GPU, torch.bfloat16)
    if compiled:
        template.compile_blocks()
    masters = tiny_masters(template.spec)
    logits, loss, sums = whole(family, masters, compiled)
    for keep in (False, True):
        homes = Homes(template, masters, "bf16")
        assert torch.equal(streamed_logits(template, homes, batches()[0]), logits)
        assert streamed_step(template, homes, batches(), SCALE, CHUNK_TOKENS, keep) == loss
        streamed = homes.gradients()
        assert streamed.keys() == sums.keys()
        for name, total in sums.items():
            assert torch.equal(streamed[name], total), (keep, name, (streamed[name] - total).abs().max())


SMALL = (tiny_batch([90, 30, 8], seed=0), tiny_batch([28, 100], seed=1))


@pytest.mark.parametrize("case", CASES)
def test_each_accepted_family_streams_as_it_is(case: str) -> None:
    """Eager, bf16, recomputed and kept: every family of the registry, bit for bit."""
    template = ModelTemplate(tiny_config(case), GPU, torch.bfloat16)
    masters, buffers = tiny_masters(template.spec), tiny_buffers(template)
    for name, buffer in template.saved_buffers.items():
        buffer.copy_(buffers[name])
    run = reference.whole(tiny_config(case), torch.bfloat16, "megatrain", "cuda")
    weights = {name: compute_weight(master, "bf16") for name, master in masters.items()}
    tied = {OUTPUT: weights[template.spec.segments[0].tensors[0].name]} if template.spec.tied else {}
    reference.set_state(run.model, weights | tied, {name: value.cuda() for name, value in buffers.items()})
    micro_batches = [TokenBatch(*(t.to(GPU) for t in batch)) for batch in SMALL]
    sums = {name: torch.zeros(p.shape, device=GPU) for name, p in run.model.named_parameters()}
    loss = sum(float(reference.add_gradients(run, batch, sums, SCALE, CHUNK_TOKENS)) for batch in micro_batches)
    for keep in (False, True):
        homes = Homes(template, masters, "bf16")
        assert streamed_step(template, homes, micro_batches, SCALE, CHUNK_TOKENS, keep) == loss
        for name, total in homes.gradients().items():
            assert torch.equal(total, sums[name]), (keep, name, (total - sums[name]).abs().max())

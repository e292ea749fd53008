"""Contracts A1 and A2 on a GPU, eager and compiled: streamed logits and gradients equal the whole model's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatrain.models.batch import TokenBatch
from megatrain.models.recorders import GivenBackbone
from megatrain.models.template import ModelTemplate
from tests.families import FAMILIES, tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits, streamed_step
from tests.reference import EMBEDDING, OUTPUT, add_gradients, compute_weight

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
    tied, config.tie_word_embeddings = config.tie_word_embeddings, False
    make = AutoModelForCausalLM.from_config
    model = make(config, dtype=torch.bfloat16, attn_implementation="megatrain").eval()
    weights = {name: compute_weight(master, "bf16") for name, master in masters.items()}
    model.load_state_dict(weights | ({OUTPUT: weights[EMBEDDING]} if tied else {}), strict=True)
    output = copy.deepcopy(model.to(GPU))
    output.model = GivenBackbone()
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    sums = {name: torch.zeros(p.shape, device=GPU) for name, p in model.named_parameters()}
    loss = sum(float(add_gradients(model, output, batch, sums, SCALE, CHUNK_TOKENS)) for batch in batches())
    first = batches()[0]
    documents = first.document_ids_T.view(1, 1, 1, -1)
    ids, positions = first.input_ids_T[None], first.position_ids_T[None]
    logits = model(input_ids=ids, position_ids=positions, attention_mask=documents, use_cache=False).logits
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

"""Rotary tables that depend on a length: of each document by its own, whatever lies beside it or came before it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from megatrain.errors import ModelError
from megatrain.models.documents import Packing, tables_by_document
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from megatrain.optim import AdamW
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Streamed, same_bytes
from tests.families import tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits

CPU = torch.device("cpu")
LENGTHS = (20, 12, 5)  # long, not so long, short: the tables of the cases change at 8 tokens
BY_TYPE = "gemma3, one of two tables"  # its backbone asks for a table by layer type
CASES = ("phi3-longrope", "llama-dynamic", BY_TYPE)


def config_of(case: str) -> PreTrainedConfig:
    if case != BY_TYPE:
        return tiny_config(case)
    tables = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    }
    return tiny_config("gemma3", rope_parameters=tables, max_position_embeddings=8)


def logits_of(template: ModelTemplate, *lengths: int) -> Tensor:
    """Of the documents of one pack; document n is the same tokens in every pack."""
    homes = Homes(template, tiny_masters(template.spec), "fp32")
    parts = [tiny_batch([length], seed=length) for length in lengths]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()
    return streamed_logits(template, homes, type(parts[0])(*columns)._replace(document_ids_T=ids))[0]


@pytest.mark.parametrize("case", CASES)
def test_a_packed_document_has_the_tables_it_has_alone(case: str) -> None:
    config = config_of(case)
    packed = logits_of(ModelTemplate(config, CPU, torch.float32), *LENGTHS)
    masters = tiny_masters(model_spec(config))
    start = 0
    for length in LENGTHS:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        model.load_state_dict({name: torch.from_numpy(w) for name, w in masters.items()}, strict=False)
        with torch.no_grad():
            alone = model(input_ids=tiny_batch([length], seed=length).input_ids_T[None], use_cache=False).logits[0]
        torch.testing.assert_close(packed[start : start + length], alone, rtol=1e-4, atol=1e-4)
        start += length


@pytest.mark.parametrize("case", CASES)
def test_neighbours_and_the_past_change_no_table(case: str) -> None:
    template = ModelTemplate(config_of(case), CPU, torch.float32)
    before = logits_of(template, 13, 3)
    assert torch.equal(logits_of(template, *LENGTHS, 13, 3)[-16:], before)
    assert torch.equal(logits_of(template, 13, 3), before), "a long document that came before is forgotten"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_steps_with_tables_by_document_are_the_references(case: str, precision: str) -> None:
    config = config_of(case)
    masters = tiny_masters(model_spec(config))
    steps = [[tiny_batch(LENGTHS, seed=s), tiny_batch((5, 7, 25), seed=9 + s)] for s in range(2)]
    hypers = [AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1)] * 2
    run = Streamed(config, masters, 37, precision=precision)
    try:
        losses, state = [result.loss for result in run.train(steps, hypers)], run.state()
    finally:
        run.close()
    want = reference.train(
        config, masters, steps, hypers, precision=precision, max_grad_norm=1.0, chunk_tokens=CHUNK_TOKENS
    )
    assert losses == want.losses
    assert same_bytes(state, want.state) == []


def test_tables_made_elsewhere_are_refused() -> None:
    with pytest.raises(ModelError, match="rope_type"):
        tables_by_document(torch.nn.Linear(1, 1), tiny_config("llama-dynamic"), Packing())
    assert not tables_by_document(torch.nn.Linear(1, 1), LlamaConfig(), Packing())

"""Compiled layers whose graph breaks, as some families' do: what is trained is what is trained without compiling."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedConfig

from bench.baseline import PlainStep
from bench.step import HYPER
from megatrain.models.batch import TokenBatch
from megatrain.models.template import ModelTemplate
from tests import reference
from tests.families import tiny_batch, tiny_config, tiny_masters

CPU = torch.device("cpu")
SCALE, CHUNK_TOKENS = 1e-3, 64


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def llama() -> PreTrainedConfig:
    return tiny_config("llama", num_hidden_layers=1)


def gradients(compiled: bool, keeps: bool) -> dict[str, Tensor]:
    """Of the layer's weights, which have a gradient of another dtype before the layer runs: graphs break there."""
    template = ModelTemplate(llama(), CPU, torch.bfloat16)
    if compiled:
        template.compile_blocks()
    segment = template.spec.blocks[0]
    masters = tiny_masters(template.spec)
    w = {t.local: reference.compute_weight(masters[t.name], "bf16").requires_grad_() for t in segment.tensors}
    for weight in w.values():
        weight.grad_dtype = torch.float32
        weight.grad = torch.zeros(weight.shape)
    batch = TokenBatch(*tiny_batch((90, 38)))
    _, calls = template.embed(
        {"embed_tokens.weight": torch.zeros(template.spec.vocab_size, 64, dtype=torch.bfloat16)}, batch
    )
    h = torch.randn(1, 128, 64, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    out = template.apply_block(0, w, h, calls, keeps=keeps)
    torch.autograd.backward(out.h, torch.ones_like(out.h))
    return {name: weight.grad for name, weight in w.items() if weight.grad is not None}


@pytest.mark.parametrize("keeps", [False, True])
def test_attention_is_trained_where_the_graph_breaks(keeps: bool) -> None:
    want, got = gradients(False, keeps), gradients(True, keeps)
    assert counters["graph_break"], "nothing broke: this tests nothing"
    for name, gradient in want.items():
        apart = float((got[name] - gradient).norm() / gradient.norm())
        assert apart < 0.02, f"{name}: {apart:.3f} of the gradient's norm away from the eager one"


@pytest.mark.parametrize("keep", [False, True])
def test_the_plain_step_is_compiled_whole_and_has_the_references_gradients(keep: bool) -> None:
    """The yardstick of the benchmarks: if it did less work, or ran half compiled, every ratio would lie."""
    torch.manual_seed(0)
    plain = PlainStep(llama(), HYPER, CPU, torch.bfloat16, loss_chunk_tokens=CHUNK_TOKENS, keep=keep, compiled=True)
    batches = [TokenBatch(*tiny_batch((90, 38), seed=i)) for i in range(2)]
    for batch in batches:
        plain._micro_batch(batch, SCALE)
    run = reference.whole(llama(), torch.bfloat16, "megatrain")
    reference.set_state(run.model, {n: p.detach().clone() for n, p in plain.model.named_parameters()}, {})
    sums = {name: torch.zeros(p.shape) for name, p in run.model.named_parameters()}
    for batch in batches:
        reference.add_gradients(run, batch, sums, SCALE, CHUNK_TOKENS)
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert sums.keys() == {name for name, _ in plain.model.named_parameters()}
    for name, p in plain.model.named_parameters():
        assert torch.equal(plain.sums[p], sums[name]), name


def test_a_plain_step_leaves_nothing_behind() -> None:
    """Its hooks held 95 GB when the next setting was measured."""
    plain = PlainStep(llama(), HYPER, CPU, torch.bfloat16, loss_chunk_tokens=CHUNK_TOKENS, keep=True, compiled=False)
    plain.step([tiny_batch((32,))], 16)
    left = [weakref.ref(plain), weakref.ref(plain.params[0]), weakref.ref(plain.masters[0])]
    plain.close()
    del plain
    gc.collect()
    assert [ref() for ref in left] == [None, None, None]

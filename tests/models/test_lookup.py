"""The table's gradient over the rows looked up has the bits of the whole table's, and every family's lookup is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.models.grad import embed_backward
from megatrain.models.layout import embedding_of
from megatrain.models.lookup import Lookups
from megatrain.models.template import ModelTemplate, leaves_of
from tests.families import CASES, tiny_batch, tiny_config, tiny_masters
from tests.reference import compute_weight

CPU = torch.device("cpu")
NUM_ROWS = 50


@pytest.fixture
def table_VD() -> Tensor:
    return torch.randn(NUM_ROWS, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_has_the_bits_of_the_whole_tables(
    table_VD: Tensor, dtype: torch.dtype, padding_idx: int | None
) -> None:
    dice = torch.Generator().manual_seed(0)
    leaf = table_VD.to(dtype).requires_grad_()
    ids = torch.randint(0, 20, (1, 64), generator=dice)  # every row some three times; 30 rows never
    dh = torch.randn(1, 64, 16, generator=dice).to(dtype)
    before_VD = torch.randn(NUM_ROWS, 16, generator=dice)
    with Lookups(leaf) as lookups:
        h = functional.embedding(ids, leaf, padding_idx) * 3.0
    lookup = lookups.only
    assert lookup is not None
    whole_VD, drows = torch.autograd.grad(h, [leaf, lookup.edge], dh)
    grad_VD = before_VD.clone()
    lookup.add_gradient(grad_VD, drows)
    assert torch.equal(grad_VD, before_VD + whole_VD.float())
    moved = (grad_VD != before_VD).any(1).nonzero().flatten().tolist()
    assert moved == [row for row in sorted({*ids.flatten().tolist()}) if row != padding_idx]


@pytest.mark.parametrize(
    "use",
    [
        lambda ids, leaf: functional.embedding(ids, leaf) + functional.embedding(ids, leaf),
        lambda ids, leaf: functional.embedding(ids, leaf) @ leaf.T,
        lambda ids, leaf: functional.embedding(ids, leaf, scale_grad_by_freq=True),
        lambda ids, leaf: leaf[ids],
        lambda ids, leaf: functional.embedding(ids, leaf) + torch.cat([leaf, leaf])[:4],
        lambda ids, leaf: functional.embedding(ids, leaf) + leaf.split(4)[0],
    ],
    ids=["two lookups", "a product beside it", "scaled by frequency", "indexed", "in a list", "in parts"],
)
def test_a_table_with_other_uses_is_left_to_autograd(table_VD: Tensor, use: Callable[[Tensor, Tensor], Tensor]) -> None:
    with Lookups(table_VD.requires_grad_()) as lookups:
        use(torch.arange(4), table_VD)
    assert lookups.only is None


@pytest.mark.parametrize("family", CASES)
def test_every_familys_lookup_is_seen(family: str) -> None:
    template = ModelTemplate(tiny_config(family), CPU, torch.float32)
    masters, embed = tiny_masters(template.spec), template.spec.segments[0]
    w = {tensor.local: compute_weight(masters[tensor.name], "fp32") for tensor in embed.tensors}
    leaves = leaves_of(w, frozenset(w))
    with Lookups(leaves[embedding_of(template.spec).local]) as lookups:
        template.embed(leaves, tiny_batch((10, 6)))
    assert lookups.only is not None


def test_no_gradient_of_the_whole_table_is_made() -> None:
    template = ModelTemplate(tiny_config("llama"), CPU, torch.float32)
    masters, batch = tiny_masters(template.spec), tiny_batch((10, 6))
    embed = template.spec.segments[0]
    w = {tensor.local: compute_weight(masters[tensor.name], "fp32") for tensor in embed.tensors}
    grads = {name: torch.zeros_like(value) for name, value in w.items()}
    dh = torch.ones(1, 16, template.spec.hidden_size)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        embed_backward(template, w, grads, batch, dh)
    backward = [event for event in seen.events() if event.name == "aten::embedding_dense_backward"]
    assert [event.input_shapes[0][-2:] for event in backward] == [[16, template.spec.hidden_size]]
    (grad,) = grads.values()
    assert int(grad.any(1).sum()) == len({*batch.input_ids_T.tolist()})

"""A block that kept what its attention gave does not attend again, and has the gradients of one that does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megatrain.models import attention, attention_cpu
from megatrain.models.attention import Attended
from megatrain.models.grad import block_backward
from megatrain.models.template import ModelTemplate
from tests.families import CASES, tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes

CPU = torch.device("cpu")
BATCH = tiny_batch([20, 12, 5])
KEPT = [case for case in ("llama", "gemma2", "gpt_oss", "qwen3_moe", "deepseek_v3", "minicpm3") if case in CASES]


class Block:
    """The last block of a tiny model that can keep its attention, run by hand."""

    def __init__(self, case: str, precision: str) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.template = ModelTemplate(tiny_config(case), CPU, dtype)
        self.homes = Homes(self.template, tiny_masters(self.template.spec), precision)
        shapes = self.template.spec.attention
        self.index = max(i for i, shape in enumerate(shapes) if shape.can_be_kept)
        out_elements, num_heads = shapes[self.index].kept_elements
        tokens = BATCH.input_ids_T.numel()
        out_1THE = torch.full((1, tokens, num_heads, out_elements // num_heads), torch.nan, dtype=dtype)
        self.place = Attended(out_1THE, torch.full((1, num_heads, tokens), torch.nan))
        h, self.calls = self.template.embed(self.homes.own("EMBED"), BATCH)
        self.h, self.name = h.detach(), self.template.spec.blocks[self.index].name

    def forward(self) -> Tensor:
        w = self.homes.fetch(self.name, 0)
        return self.template.block(self.index, w, self.h, self.calls, self.place)

    def backward(self, attended: Attended | None) -> tuple[Tensor, dict[str, Tensor]]:
        w, grads = self.homes.fetch(self.name, 1), self.homes.grad_views(self.name)
        for view in grads.values():
            view.zero_()
        dh = torch.from_numpy(np.random.default_rng(3).standard_normal(self.h.shape)).to(self.h.dtype)
        dx = block_backward(self.template, self.index, w, grads, self.h, self.calls, dh, attended)
        return dx, {name: view.clone() for name, view in grads.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", KEPT)
def test_gradients_are_those_of_a_block_that_attends_again(case: str, precision: str) -> None:
    block = Block(case, precision)
    block.forward()
    assert all(part.isfinite().all() for part in block.place), f"{case}: attention left nothing in its place"
    (dx, kept), (want_dx, want) = block.backward(block.place), block.backward(None)
    assert torch.equal(dx, want_dx), f"{case}: the gradient at the block's input"
    for name, gradient in want.items():
        assert torch.equal(kept[name], gradient), f"{case}: the gradient of {name}"


def test_what_was_kept_is_what_counts() -> None:
    """Other values in its place give other gradients, so nothing was computed anew."""
    block = Block("llama", "fp32")
    block.forward()
    right, _ = block.backward(block.place)
    for part in range(2):
        wrong = Attended(*(x * 1.5 if i == part else x for i, x in enumerate(block.place)))
        assert not torch.equal(block.backward(wrong)[0], right), Attended._fields[part]


def test_what_is_lent_comes_back_as_copies_and_nothing_attends() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(3))
    ids = torch.zeros(9, dtype=torch.int32)
    first = attention.attention(q, k, v, ids, scale=0.3)
    lent = Attended(*(torch.full_like(x, 7.0) for x in first))
    again = attention.attention(q, k, v, ids, scale=0.3, lent=lent)
    for x, y in zip(again, lent, strict=True):
        assert torch.equal(x, y)
        assert x.data_ptr() != y.data_ptr()
    assert torch.equal(first.out_1THE, attention_cpu.forward(q, k, v, ids, None, 0.3, 0, 0.0)[0])

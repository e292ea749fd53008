"""What a compiled block saves, by the compiler's own choice, beside what the planner counts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from megatrain.models.layout import layout_of
from megatrain.models.template import ModelTemplate, leaves_of
from megatrain.planner.sizes import Shapes
from tests.families import tiny_batch, tiny_config, tiny_masters
from tests.reference import compute_weight

CPU = torch.device("cpu")
TOKENS = 64
SMALL = 0.03  # of a tiny block: what norms and routers keep for a token, whatever its width


def compiled(template: ModelTemplate) -> None:
    """As `compile_blocks`, but that the graphs run as they are."""
    partition = partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph, partition_fn=partition, decompositions=select_decomp_table()
    )
    template._call_block = torch.compile(template._call_block, dynamic=False, backend=backend)


def saved_bytes(template: ModelTemplate, index: int) -> int:
    """Of what autograd saves of a block that is neither a weight nor given to the block."""
    masters = tiny_masters(template.spec)
    embed, block = (
        {tensor.local: compute_weight(masters[tensor.name], "bf16") for tensor in segment.tensors}
        for segment in (template.spec.segments[0], template.spec.blocks[index])
    )
    with torch.no_grad():
        h, calls = template.embed(embed, tiny_batch((TOKENS,)))
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    given = torch.utils._pytree.tree_leaves((h, block, calls[index].args, calls[index].kwargs))
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        leaves = leaves_of(block, template.trainable(template.spec.blocks[index]))
        template.apply_block(index, leaves, h.detach().requires_grad_(), calls)
    for tensor in given:
        if isinstance(tensor, Tensor):
            found.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(found.values())


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "phi3"])
def test_no_less_is_counted_than_is_saved(family: str) -> None:
    torch._dynamo.reset()
    template = ModelTemplate(tiny_config(family), CPU, torch.bfloat16)
    compiled(template)
    layouts = {segment.name: layout_of(segment) for segment in template.spec.segments}
    counted = Shapes(template.spec, layouts, 2, TOKENS, 512, compiled=True).saved_bytes["L000"]
    seen = saved_bytes(template, 0)
    assert seen < counted * (1 + SMALL)
    assert seen > counted * 0.85

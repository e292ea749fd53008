"""What a compiled block saves, by the compiler's own choice, beside what the planner counts."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from transformers import PreTrainedConfig

from megatrain.models.families import FAMILIES
from megatrain.models.layout import layout_of
from megatrain.models.meta import architecture_of
from megatrain.models.template import ModelTemplate, leaves_of
from megatrain.planner.saved import CARRIED
from megatrain.planner.sizes import Shapes
from tests.families import CASES, mostly_slow, tiny_batch, tiny_config, tiny_masters
from tests.reference import compute_weight

CPU = torch.device("cpu")
TOKENS = 64
UNDER, OVER = 1.025, 1.25  # as much may be saved of what is counted, and counted of what is saved
QUICK = ("llama", "gemma3", "gpt_neox", "phi3", "nanochat", "cohere2", "mimo_v2_flash", "bitnet")
# One of each way to carry state, with heads and chunks as published; the hidden state is narrower.
_MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_chunk_size": 256}
USUAL: dict[str, dict[str, int]] = {
    "lfm2": {},
    "recurrent_gemma": {"lru_width": 1024, "num_key_value_heads": 1},
    "minimax": {"num_key_value_heads": 8, "head_dim": 128, "block_size": 256},
    "qwen3_5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"linear_num_key_heads": 8, "linear_num_value_heads": 16},
    "olmo_hybrid": {"linear_key_head_dim": 96, "linear_value_head_dim": 192}
    | {"linear_num_key_heads": 8, "linear_num_value_heads": 8},
    "kimi_linear": {"linear_head_dim": 128, "linear_num_heads": 8},
    "mamba": {"state_size": 16},
    "jamba": {"mamba_d_state": 16, "mamba_dt_rank": 64},
    "nemotron_h": {"ssm_state_size": 128, "mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 8}
    | {"chunk_size": 128},
    "bamba": _MAMBA,
    "granitemoehybrid": _MAMBA,
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 2048, "mamba_chunk_size": 128, "head_dim": 128},
}
# Families that are not compiled, with layers wide enough for what is not a matrix to be small.
EAGER: dict[str, dict[str, int]] = {
    "jetmoe": {"hidden_size": 1024, "intermediate_size": 2816, "kv_channels": 128, "num_key_value_heads": 8},
    "longcat_flash": {"hidden_size": 512},
}


def compiled(template: ModelTemplate) -> None:
    """As `compile_blocks`, but that the graphs run as they are."""
    partition = partial(min_cut_rematerialization_partition, compiler="inductor")
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph, partition_fn=partition, decompositions=select_decomp_table()
    )
    template._call_block = torch.compile(template._call_block, dynamic=False, backend=backend)


def saved_bytes(template: ModelTemplate, index: int, tokens: int) -> int:
    """Of what autograd saves of a block that is neither a weight nor given to the block."""
    masters = tiny_masters(template.spec)
    embed, block = (
        {tensor.local: compute_weight(masters[tensor.name], "bf16") for tensor in segment.tensors}
        for segment in (template.spec.segments[0], template.spec.blocks[index])
    )
    with torch.no_grad():
        h, calls = template.embed(embed, tiny_batch((tokens,)))
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


def compared(config: PreTrainedConfig, tokens: int, left_out: Collection[str] = ()) -> dict[str, tuple[float, int]]:
    """One block of each kind -> bytes that are counted, bytes that are saved; without blocks that carry state so."""
    template = ModelTemplate(config, CPU, torch.bfloat16)
    one_graph = FAMILIES[architecture_of(config)].one_graph
    if one_graph:
        compiled(template)
    spec = template.spec
    layouts = {segment.name: layout_of(segment) for segment in spec.segments}
    counted = Shapes(spec, layouts, 2, tokens, 512, compiled=one_graph).saved_bytes
    table, kinds = {}, set()
    for index, (block, attention) in enumerate(zip(spec.blocks, spec.attention, strict=True)):
        kind = (tuple((t.local, t.shape) for t in block.tensors), attention, block.traits)
        if kind not in kinds and not any(how in left_out for _, how in block.traits.carries):
            torch._dynamo.reset()
            table[block.name] = counted[block.name], saved_bytes(template, index, tokens)
        kinds.add(kind)
    return table


@pytest.mark.parametrize("family", mostly_slow([case for case in CASES if case not in EAGER], *QUICK))
def test_no_less_is_counted_than_is_saved(family: str) -> None:
    table = compared(tiny_config(family), TOKENS, left_out=CARRIED.keys() - {"convolution"})
    for block, (counted, seen) in table.items():
        assert seen < counted * UNDER, block
        assert counted < seen * OVER, block


@pytest.mark.parametrize("family", EAGER)
def test_what_is_not_compiled_is_counted(family: str) -> None:
    counted, seen = compared(tiny_config(family, **EAGER[family]), 512)["L000"]
    assert seen < counted * UNDER
    assert counted < seen * OVER


@pytest.mark.parametrize("family", mostly_slow(tuple(USUAL), "falcon_h1"))
def test_what_carries_state_is_counted_at_its_usual_sizes(family: str) -> None:
    changes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8} | USUAL[family]
    counted, seen = compared(tiny_config(family, **changes), 512)["L000"]
    assert seen < counted * UNDER
    assert counted < seen * 1.35

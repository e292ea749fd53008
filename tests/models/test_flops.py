"""The FLOP counter against sums written out by hand, and against the framework's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatrain.models.flops import attention_flops, eval_flops, hardware_flops, train_flops, visible_pairs
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from tests.families import FAMILIES, tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits


@pytest.mark.parametrize("window", [None, 1, 3, 5, 7, 100])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 7])
def test_visible_pairs_counts_the_mask(length: int, window: int | None) -> None:
    reach = window or length + 1
    pairs = sum(1 for query in range(length) for key in range(query + 1) if query - key < reach)
    assert visible_pairs(length, window) == pairs


def test_attention_depends_on_documents_and_windows() -> None:
    spec = model_spec(tiny_config("qwen2"))  # block 0 is full, the others have windows of 8
    assert attention_flops(spec, 0, [10, 2]) == 4 * 4 * 16 * (55 + 3)
    assert attention_flops(spec, 1, [10, 2]) == 4 * 4 * 16 * (36 + 16 + 3)


def test_totals() -> None:
    spec = model_spec(tiny_config("llama"))
    attention = 3 * 4 * 4 * 16 * (55 + 3)
    assert eval_flops(spec, [10, 2]) == 2 * spec.active_parameters * 12 + attention
    assert train_flops(spec, [10, 2]) == 6 * spec.active_parameters * 12 + 3 * attention
    assert hardware_flops(spec, [10, 2], 0, [False] * 3) == train_flops(spec, [10, 2])
    block = sum(t.num_elements for t in spec.blocks[1].tensors)
    with_attention, without = (hardware_flops(spec, [10, 2], 0, [True] * 3, kept) for kept in ((), (0, 2)))
    assert with_attention - without == 2 * attention // 3
    assert hardware_flops(spec, [10, 2], 4, [False, True, False]) == (
        6 * spec.active_parameters * 16 + 3 * attention + 2 * block * 16 + attention // 3
    )


def test_a_second_backward_does_everything_again_but_attend_where_that_is_kept() -> None:
    spec = model_spec(tiny_config("llama"))
    attention = attention_flops(spec, 1, [10, 2])
    for recomputed in ([False] * 3, [True] * 3):
        for kept in ((), (1,)):
            once, twice = (hardware_flops(spec, [10, 2], 4, recomputed, kept, backwards) for backwards in (1, 2))
            again = train_flops(spec, [10, 2]) + 6 * spec.active_parameters * 4
            assert twice - once == again - len(kept) * attention


def test_chunks_and_values_of_another_size() -> None:
    chunked, mla = model_spec(tiny_config("llama4")), model_spec(tiny_config("deepseek_v3"))
    assert attention_flops(chunked, 0, [20]) == 4 * 4 * 16 * (36 + 36 + 10)  # chunks of 8
    assert attention_flops(chunked, 3, [20]) == 4 * 4 * 16 * 210
    assert attention_flops(mla, 0, [20]) == 2 * 4 * (20 + 16) * 210
    assert attention_flops(model_spec(tiny_config("qwen3_next")), 0, [20]) == 0


def test_of_experts_the_chosen_ones_count() -> None:
    """Two of four experts of 32 a token, on the last two blocks; the shared expert and the dense first block whole."""
    spec = model_spec(tiny_config("qwen3_moe"))
    one_expert = 3 * 32 * 64
    assert spec.active_parameters == spec.num_parameters - 96 * 64 - 2 * 2 * one_expert
    all_of_it = [sum(t.num_elements for t in block.tensors) for block in spec.blocks]
    assert spec.active_by_block == (all_of_it[0], *(size - 2 * one_expert for size in all_of_it[1:]))
    again = [False, True, False]
    attention = attention_flops(spec, 1, [10])
    more = hardware_flops(spec, [10], 0, again) - train_flops(spec, [10])
    assert more == 2 * spec.active_by_block[1] * 10 + attention


@pytest.mark.parametrize("family", FAMILIES)
def test_matrix_products_agree_with_the_frameworks_counter(family: str) -> None:
    """A forward pass, without attention (an operator of ours, which that counter does not see)."""
    template = ModelTemplate(tiny_config(family), torch.device("cpu"), torch.float32)
    homes = Homes(template, tiny_masters(template.spec), "fp32")
    with FlopCounterMode(display=False) as counter:
        streamed_logits(template, homes, tiny_batch([20, 12]))
    vectors = sum(t.num_elements for s in template.spec.segments for t in s.tensors if len(t.shape) == 1)
    expected = 2 * 32 * (template.spec.active_parameters - vectors)
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)  # some versions multiply for rotary tables

"""What a compiled block saves: to a thousandth what was seen on an H200, and counted by hand for other kinds of blocks.

Seen figures: working_bytes and marks of run 776e91b7 in bench/results (Llama-3-8B blocks, bf16, compiled).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from bench.presets import PRESETS
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec, SegmentSpec, TensorSpec
from megatrain.models.spec_of import model_spec
from megatrain.planner import saved
from megatrain.planner.sizes import (
    Shapes,
    backward_working_bytes,
    embedding_working_bytes,
    head_working_bytes,
    unused_pool_bytes,
)


def spec_of(model: str, **fields: object) -> ModelSpec:
    values = dict(PRESETS[model]) | {"num_hidden_layers": 2} | fields
    return model_spec(CONFIG_MAPPING[str(values.pop("model_type"))](**values))


def shapes_of(model: str, tokens: int, compiled: bool = True, compute_bytes: int = 2) -> Shapes:
    spec = spec_of(model)
    layouts = {segment.name: layout_of(segment) for segment in spec.segments}
    return Shapes(spec, layouts, compute_bytes, tokens, 2048, compiled, fused_loss=True)


def elements(spec: ModelSpec) -> float:
    share = saved.expert_share(spec)
    return saved.saved_elements(spec.blocks[0], spec.attention[0], spec.hidden_size, share)


@pytest.mark.parametrize(
    ("tokens", "forward", "recomputed", "kept", "head"),
    [(16384, 2283929600, 2871132160, 587202560, 3314624000), (8192, 1141964800, 1494286336, 352321536, 2979046912)],
)
def test_a_llama_block_takes_what_was_seen(tokens: int, forward: int, recomputed: int, kept: int, head: int) -> None:
    """FORWARD saves, gives its output, and drops both."""
    shapes = shapes_of("llama-3-8b", tokens)
    output = tokens * 4096 * 2
    assert shapes.saved_bytes["L000"] + output == pytest.approx(forward, rel=1e-3)
    assert backward_working_bytes(shapes, "L000", is_kept=False) == pytest.approx(recomputed, rel=1e-3)
    assert backward_working_bytes(shapes, "L000", is_kept=True) == pytest.approx(kept, rel=1e-3)
    assert head_working_bytes(shapes) == pytest.approx(head - dw_bytes(shapes), rel=1e-3)


def dw_bytes(shapes: Shapes) -> int:
    """When HEAD was measured, a chunk's dW was still there beside the next one's."""
    return shapes.spec.vocab_size * shapes.spec.hidden_size * 2


@pytest.mark.parametrize(
    ("preset", "tokens", "head"), [("llama-3.2-1b", 16384, 1920017920), ("qwen2.5-7b", 16384, 3404801536)]
)
def test_a_head_takes_what_was_seen(preset: str, tokens: int, head: int) -> None:
    """Tied or not."""
    shapes = shapes_of(preset, tokens)
    assert head_working_bytes(shapes) == pytest.approx(head - dw_bytes(shapes), rel=1e-3)


def test_few_tokens_end_with_the_gradients_of_all_matrices() -> None:
    shapes = shapes_of("llama-3-8b", 1024)
    block = shapes.layouts["L000"].num_trainable * 2
    assert backward_working_bytes(shapes, "L000", is_kept=False) == block + 8 * 1024 * 4096 * 2
    kept = shapes.saved_bytes["L000"]
    assert backward_working_bytes(shapes, "L000", is_kept=True) == block + 8 * 1024 * 4096 * 2 - kept


def test_an_eager_block_is_counted_by_its_matrices() -> None:
    shapes = shapes_of("llama-3-8b", 1024, compiled=False)
    assert shapes.saved_bytes["L000"] == pytest.approx(1.6 * 1024 * 2 * 20 * 4096)
    flows = 4 * 1024 * 4096 * 2 + shapes.layouts["L000"].num_trainable * 2
    assert backward_working_bytes(shapes, "L000", is_kept=True) == flows
    assert backward_working_bytes(shapes, "L000", is_kept=False) == flows + shapes.saved_bytes["L000"]


def test_norms_of_q_and_k_and_norms_behind_a_module_save_more() -> None:
    """Gemma 3 4B: D 2560, q 2048, k and v 1024, F 10240, four norms over D."""
    d, q, kv, f = 2560, 2048, 1024, 10240
    read = d + q + d + f  # by q k v, by o, by gate and up, by down
    given = q + 2 * kv + 2 * f
    normed = 3 * d + (q + kv)  # what three norms over D read; q and k as attention reads them
    rows = 4 + (8 + 4)  # norms over D; heads of q and of k, 256 wide
    assert elements(spec_of("gemma-3-4b")) == read + given + normed + rows * saved.NORM_ELEMENTS


def test_experts_save_all_that_the_chosen_ones_read_and_give() -> None:
    """Qwen3 30B A3B: D 2048, q 4096, k and v 512, 8 of 128 experts of 768."""
    d, q, kv, e, k, f = 2048, 4096, 512, 128, 8, 768
    attention = d + q + 2 * kv + (q + kv) + q  # read by q k v; given; normed; its output
    experts = k * (d + 2 * f + f + d)
    rows = 2 + (32 + 4)
    small = 4 * e + 18 * k + rows * saved.NORM_ELEMENTS
    assert elements(spec_of("qwen3-30b-a3b")) == pytest.approx(attention + d + (d + e) + experts + small)


def test_a_block_that_does_something_else_is_counted_by_its_matrices() -> None:
    spec = spec_of("llama-3-8b")
    block, attention = spec.blocks[0], spec.attention[0]
    linear = saved.linear_elements(block, 0.0)
    assert linear == 20 * 4096
    twice = replace(attention, num_calls=None)
    assert saved.saved_elements(block, twice, 4096, 0.0) == linear
    assert saved.saved_elements(block, replace(attention, num_calls=2), 4096, 0.0) == linear + 4096


def changed(block: SegmentSpec, **traits: object) -> SegmentSpec:
    return replace(block, traits=replace(block.traits, **traits))


def test_what_the_tensors_do_not_show_is_counted_by_the_traits() -> None:
    """A Llama block: D 4096, q 4096, k and v 1024."""
    spec = spec_of("llama-3-8b")
    block, attention = spec.blocks[0], spec.attention[0]

    def more(**traits: object) -> float:
        return saved.saved_elements(changed(block, **traits), attention, 4096, 0.0) - elements(spec)

    assert more(clips=True) == (4096 + 2 * 1024) / 2  # a byte each
    heads = 32 + 8
    assert more(bare_norms=("self_attn.q_norm", "self_attn.k_norm")) == 4096 + 1024 + heads * saved.NORM_ELEMENTS
    assert more(bare_norms=("norm",)) == 4096 + saved.NORM_ELEMENTS
    assert more(corrects_choice=True) == 4096


def test_side_by_side_attention_and_mlp_read_the_same() -> None:
    spec = spec_of("llama-3-8b")
    block = spec.blocks[0]
    one = replace(block, tensors=tuple(t for t in block.tensors if "post_attention" not in t.local))
    fewer = elements(spec) - saved.saved_elements(one, spec.attention[0], 4096, 0.0)
    assert fewer == 2 * 4096 + saved.NORM_ELEMENTS  # what the second norm reads, and gives


def test_a_convolution_is_none_of_the_experts() -> None:
    convolution = TensorSpec("conv", "mixer.conv1d.weight", (64, 1, 4), trainable=True, decay=True)
    block = spec_of("qwen3-30b-a3b").blocks[0]
    mixed = replace(block, tensors=(*block.tensors, convolution))
    assert saved.linear_elements(mixed, 0.5) == saved.linear_elements(block, 0.5)


def test_experts_that_all_run_are_counted_whole() -> None:
    block = spec_of("qwen3-30b-a3b").blocks[0]
    assert saved.linear_elements(changed(block, runs_all_experts=True), 0.1) == saved.linear_elements(block, 1.0)
    assert saved.widest_elements(changed(block, runs_all_experts=True), 0.1) == 128 * 2048


def test_a_frozen_matrix_has_no_gradient() -> None:
    block = spec_of("llama-3-8b").blocks[0]
    assert saved.largest_gradient_elements(block) == 14336 * 4096
    still = replace(block, tensors=tuple(replace(t, trainable="mlp" not in t.local) for t in block.tensors))
    assert saved.largest_gradient_elements(still) == 4096 * 4096


def test_the_backward_of_chosen_experts_begins_with_the_rows_they_gave() -> None:
    """As seen of Qwen3 30B-A3B on an H200, 16,384 tokens to 8 experts each: 1,080,069,632 bytes."""
    shapes = shapes_of("qwen3-30b-a3b", 16384)
    kept = backward_working_bytes(shapes, "L000", is_kept=True)
    assert kept == pytest.approx(1080.07e6, rel=1e-3)
    again = backward_working_bytes(shapes, "L000", is_kept=False)
    assert again - kept == shapes.saved_bytes["L000"] + 16384 * 2048 * 2


@pytest.mark.parametrize(("compute_bytes", "a_value"), [(2, 12), (4, 16)])
def test_the_backward_of_the_embedding_takes_the_rows_of_its_tokens(compute_bytes: int, a_value: int) -> None:
    rotary_tables = 1024 * 2 * 128 * compute_bytes
    seen = embedding_working_bytes(shapes_of("llama-3-8b", 1024, True, compute_bytes))
    assert seen == a_value * 1024 * 4096 + rotary_tables


def test_a_scaled_embedding_and_a_norm_in_fp32_take_more() -> None:
    """As seen of Gemma 3 4B on an H200, 16,384 tokens: 705,702,400 and 2,930,396,672 bytes."""
    shapes = shapes_of("gemma-3-4b", 16384)
    assert (shapes.spec.embedding_copies, shapes.spec.tail_flows) == (1, 4)
    of_other_windows = 16384 * 2 * 256 * 2  # rotary tables: six layers have both kinds, these two have one
    assert embedding_working_bytes(shapes) + of_other_windows == pytest.approx(705.7e6, rel=3e-3)
    assert head_working_bytes(shapes) == pytest.approx(2930.4e6, rel=1e-3)


@pytest.mark.parametrize(
    ("preset", "largest_bytes"),
    [("llama-3-8b", 128256 * 4096 * 2), ("qwen3-30b-a3b", 128 * 2 * 768 * 2048 * 2)],
)
def test_the_pool_keeps_part_of_the_largest_tensor_unused(preset: str, largest_bytes: int) -> None:
    """Seen: 0.20 GB of the embedding's 1.05, 0.15 of the experts' 0.81."""
    assert unused_pool_bytes(shapes_of(preset, 8192)) == pytest.approx(0.25 * largest_bytes)


def test_where_the_vocabulary_is_small_the_last_norm_takes_most() -> None:
    """As seen of 32,768 words on an H200."""
    spec = spec_of("llama-3-8b", vocab_size=32768)
    assert head_working_bytes(replace(shapes_of("llama-3-8b", 16384), spec=spec)) == pytest.approx(1879e6, rel=1e-3)


def test_without_a_compiler_no_less_is_saved() -> None:
    """Where state is carried along the tokens, matrices are the smaller part of it."""
    spec = model_spec(CONFIG_MAPPING["mamba"](hidden_size=64, num_hidden_layers=2, vocab_size=64))
    layouts = {segment.name: layout_of(segment) for segment in spec.segments}
    eager, compiled = (Shapes(spec, layouts, 2, 512, 512, way) for way in (False, True))
    assert eager.saved_bytes == compiled.saved_bytes
    assert compiled.saved_bytes["L000"] > 1.6 * compiled.linear_bytes["L000"]
    llama = shapes_of("llama-3-8b", 1024, compiled=False)
    assert llama.saved_bytes["L000"] == int(1.6 * llama.linear_bytes["L000"])

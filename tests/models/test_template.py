"""Templates: buffers, what they hold, kept graphs, refusals, compiled blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM

from megatrain.errors import ModelError
from megatrain.models.grad import _Rebinding, block_backward, block_backward_kept, block_keep
from megatrain.models.recorders import Recorder, Tape
from megatrain.models.template import ModelTemplate, leaves_of
from tests import reference
from tests.families import FAMILIES, tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits, streamed_step
from tests.reference import compute_weight

CPU = torch.device("cpu")
BATCH = tiny_batch([20, 12, 5])


def modules_of(template: ModelTemplate) -> list[nn.Module]:
    return [template._before, template._after, template._output, *template._layers]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffers_are_the_real_models_and_parameters_are_not_there(family: str, dtype: torch.dtype) -> None:
    template = ModelTemplate(tiny_config(family), CPU, dtype)
    real = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype)
    expected = dict(real.model.named_buffers())
    for backbone in (template._before, template._after):
        found = dict(backbone.named_buffers())
        absent = set() if backbone is template._before else {"embed_tokens.embed_scale"}
        assert found.keys() == expected.keys() - absent
        for name, buffer in found.items():
            assert buffer.dtype == expected[name].dtype, name
            assert torch.equal(buffer, expected[name]), name
    assert any("inv_freq" in name and buffer.dtype == torch.float32 for name, buffer in expected.items())
    assert all(p.is_meta for module in modules_of(template) for p in module.parameters())


def layer_setting(family: str, dtype: torch.dtype) -> tuple[ModelTemplate, Homes, Tensor, Any]:
    template = ModelTemplate(tiny_config(family), CPU, dtype)
    homes = Homes(template, tiny_masters(template.spec), "fp32" if dtype == torch.float32 else "bf16")
    h, calls = template.embed(homes.own("EMBED"), BATCH)
    return template, homes, h, calls


def test_block_leaves_no_graph_behind() -> None:
    template, homes, h, calls = layer_setting("llama", torch.float32)
    out = template.block(0, homes.fetch("L000", 0), h, calls)
    assert not out.requires_grad


def test_kept_graph_survives_its_weights_and_keeps_no_weight_memory() -> None:
    """The slot is overwritten by NaN and freed between forward and backward; the weights come back elsewhere."""
    template, homes, h, calls = layer_setting("qwen2", torch.bfloat16)
    dh = torch.randn(h.shape, generator=torch.Generator().manual_seed(0)).to(h.dtype)
    recomputed = homes.grad_views("L000")
    expected = block_backward(template, 0, homes.fetch("L000", 0), recomputed, h, calls, dh)
    expected_sums = {name: view.clone() for name, view in recomputed.items()}

    slot = homes.flats["L000"].clone()
    out, kept = block_keep(template, 0, homes.views(slot, "L000"), h, calls)
    assert torch.equal(out, template.block(0, homes.fetch("L000", 0), h, calls))
    slot.fill_(torch.nan)
    memory = StorageWeakRef(slot.untyped_storage())
    del slot
    assert memory.expired(), "the kept graph holds the weight slot alive"
    homes.grads["L000"].zero_()
    found = block_backward_kept(kept, homes.fetch("L000", 1), homes.grad_views("L000"), dh)
    assert torch.equal(found, expected)
    for name, view in homes.grad_views("L000").items():
        assert torch.equal(view, expected_sums[name]), name


def test_piece_of_a_weight_is_found_again() -> None:
    """A layer that saves a slice or a transposed slice of a weight gets the same piece of the moved weight."""
    first, second = torch.randn(40), torch.randn(60)
    first[10:34] = second[17:41]  # the same weight at other places of other slots
    rebinding = _Rebinding({"a": first[0:10], "w": first[10:34].view(6, 4)})
    pieces = [lambda w: w, lambda w: w[2:5], lambda w: w[3:, 1:3].t(), lambda w: w.flatten()[7:8]]
    packed = [rebinding.pack(piece(first[10:34].view(6, 4))) for piece in pieces]
    assert not any(isinstance(p, Tensor) for p in packed)
    assert isinstance(rebinding.pack(first[34:]), Tensor)  # beyond the weight
    rebinding.w_now = {"w": second[17:41].view(6, 4)}
    first.fill_(torch.nan)
    for piece, packed_one in zip(pieces, packed, strict=True):
        assert torch.equal(rebinding.unpack(packed_one), piece(rebinding.w_now["w"]))


def test_kept_graph_without_weights_says_so() -> None:
    template, homes, h, calls = layer_setting("llama", torch.float32)
    out, kept = block_keep(template, 0, homes.fetch("L000", 0), h, calls)
    with pytest.raises(AssertionError, match="before its weights were bound"):
        torch.autograd.backward(kept.edges, torch.ones_like(out), inputs=[kept.source])


def test_gradients_are_added_in_fp32_to_what_is_there() -> None:
    template, homes, h, calls = layer_setting("llama", torch.bfloat16)
    dh = torch.full_like(h, 1e-3)
    views = homes.grad_views("L000")
    block_backward(template, 0, homes.fetch("L000", 0), views, h, calls, dh)
    once = homes.grads["L000"].clone()
    homes.grads["L000"].fill_(1.0)
    block_backward(template, 0, homes.fetch("L000", 0), views, h, calls, dh)
    for name, view in homes.views(once, "L000").items():
        assert torch.equal(views[name], 1.0 + view), name
    assert (1.0 + once != (1.0 + once).to(torch.bfloat16).float()).any(), "fp32 sums must differ from bf16 ones here"


class Talker(nn.Module):
    layer_type = "talking"


@pytest.mark.parametrize(
    ("value", "refused"),
    [({}, True), ([], True), (torch.ones(1, requires_grad=True), True), ((None, torch.ones(1)), False), (3, False)],
    ids=["dict", "list", "with-gradient", "tuple", "number"],
)
def test_layers_that_talk_to_each_other_are_refused_by_name(value: object, refused: bool) -> None:
    recorder = Recorder(Talker(), Tape())
    assert recorder.layer_type == "talking"
    h = torch.ones(1, 2, 3)
    if refused:
        with pytest.raises(ModelError, match="Talker is called with 'shared'"):
            recorder(h, shared=value)
    else:
        assert recorder(h, shared=value) is h


def test_no_work_for_gradients_of_frozen_tensors() -> None:
    template = ModelTemplate(tiny_config("llama"), CPU, torch.float32, freeze=["proj"])
    homes = Homes(template, tiny_masters(template.spec), "fp32")
    leaves = leaves_of(homes.fetch("L000", 0), template.trainable(template.spec.blocks[0]))
    trained = {name for name, leaf in leaves.items() if leaf.requires_grad}
    assert trained == {"input_layernorm.weight", "post_attention_layernorm.weight"}


def test_embed_keeps_nothing_of_the_batch() -> None:
    template, _, _, calls = layer_setting("gemma3", torch.float32)
    assert len(calls) == 3
    assert template._tape.calls == []
    assert template._tape.answer is None


def compiled_template() -> ModelTemplate:
    torch._dynamo.reset()
    template = ModelTemplate(tiny_config("qwen2"), CPU, torch.bfloat16)
    template.compile_blocks()
    return template


@pytest.mark.slow
def test_compiled_blocks_have_one_graph_a_kind_and_one_result() -> None:
    """Forward, recompute and keep of a compiled block agree; layers that differ only in index share their graph."""
    template = compiled_template()
    masters = tiny_masters(template.spec)
    torch._dynamo.utils.counters.clear()
    sums, logits = [], []
    for keep in (False, True):
        homes = Homes(template, masters, "bf16")
        streamed_step(template, homes, [BATCH], 0.01, 16, keep)
        logits.append(streamed_logits(template, homes, BATCH))
        sums.append(homes.gradients())
    assert torch.equal(*logits)
    for name, total in sums[0].items():
        assert torch.equal(total, sums[1][name]), name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # with and without a window


@pytest.mark.slow
def test_compiled_layers_of_the_real_model_give_the_same_gradients() -> None:
    template = compiled_template()
    masters = tiny_masters(template.spec)
    homes = Homes(template, masters, "bf16")
    streamed_step(template, homes, [BATCH], 0.01, 16, keep=False)
    run = reference.whole(tiny_config("qwen2"), torch.bfloat16, "megatrain")
    reference.set_state(run.model, {name: compute_weight(master, "bf16") for name, master in masters.items()}, {})
    for layer in run.model.model.layers:
        layer.compile(dynamic=False)
    sums = {name: torch.zeros(p.shape) for name, p in run.model.named_parameters()}
    reference.add_gradients(run, BATCH, sums, 0.01, 16)
    for name, total in homes.gradients().items():
        assert torch.equal(total, sums[name]), name

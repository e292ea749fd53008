"""Contracts A1, A2, A9 for every family that is accepted: streamed equals the whole model, and documents stay apart."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatrain.models.batch import TokenBatch
from megatrain.models.families import FAMILIES, REFUSED, Family
from megatrain.models.router import NUM_EXPERTS, first_setting
from megatrain.models.template import ModelTemplate
from tests import reference
from tests.families import CASES, mostly_slow, tiny_batch, tiny_buffers, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits, streamed_step

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHUNK_TOKENS = 16
BATCHES = (tiny_batch([20, 12, 5], seed=0), tiny_batch([7, 30], seed=1))
EXPERT_SPREAD = 4e-6  # between logits of up to 7.5, of which up to 1.25e-6 has been seen
WITH_EXPERTS = [case for case in CASES if first_setting(tiny_config(case).to_dict(), NUM_EXPERTS)]
FEATURES = [(case, feature) for case in CASES for feature in CASES[case].features]

each_case = pytest.mark.parametrize("case", CASES)
each_precision = pytest.mark.parametrize("precision", DTYPES)


class Setting(NamedTuple):
    template: ModelTemplate
    masters: dict[str, np.ndarray]
    buffers: dict[str, Tensor]
    whole: reference.Whole

    def homes(self, precision: str) -> Homes:
        return Homes(self.template, self.masters, precision)


def fill_buffers(template: ModelTemplate, buffers: dict[str, Tensor]) -> None:
    for name, buffer in template.saved_buffers.items():
        buffer.copy_(buffers[name])


def weights_of(masters: dict[str, np.ndarray], precision: str, template: ModelTemplate) -> dict[str, Tensor]:
    """The whole model's, whose output matrix is its own."""
    weights = {name: reference.compute_weight(master, precision) for name, master in masters.items()}
    if template.spec.tied:
        weights[reference.OUTPUT] = weights[template.spec.segments[0].tensors[0].name]
    return weights


@functools.lru_cache(maxsize=2)
def setting(case: str, precision: str, attention: str = "megatrain") -> Setting:
    template = ModelTemplate(tiny_config(case), CPU, DTYPES[precision])
    masters, buffers = tiny_masters(template.spec), tiny_buffers(template)
    fill_buffers(template, buffers)
    whole = reference.whole(tiny_config(case), DTYPES[precision], attention)
    reference.set_state(whole.model, weights_of(masters, precision, template), buffers)
    return Setting(template, masters, buffers, whole)


def test_every_accepted_family_is_proven_and_no_other() -> None:
    """The registry is what the cases below prove."""
    proven = {type(AutoModelForCausalLM.from_config(tiny_config(case))).__name__ for case in CASES}
    assert proven == FAMILIES.keys() & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())  # older versions know fewer
    assert not FAMILIES.keys() & REFUSED.keys()
    assert len(FAMILIES) >= 40


@contextmanager
def seen_by_layers(template: ModelTemplate, family: Family) -> Iterator[dict[str, Tensor]]:
    """While entered: checkpoint name -> what the modules that run have bound there."""
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, _given: Any, prefix: str, names: frozenset[str] | None) -> None:
        for name, bound in module.named_parameters(remove_duplicate=False):
            if names is None or name in names:
                seen[prefix + name] = bound.detach().clone()

    inside, own = f"{family.backbone}.", frozenset(t.local for t in template.spec.segments[0].tensors)
    parts = [(template._before, inside, own), (template._after, inside, template.tail_names)]
    parts += [(template._output, "", template.output_names)]
    parts += [(layer, f"{inside}{family.layers}.{i}.", None) for i, layer in enumerate(template._layers)]
    handles = [
        module.register_forward_pre_hook(functools.partial(look, prefix=prefix, names=names))
        for module, prefix, names in parts
    ]
    yield seen
    for handle in handles:
        handle.remove()


@each_case
@each_precision
def test_logits_are_the_models_own(case: str, precision: str) -> None:
    """And every tensor is bound where the model has it: the first that is not is named."""
    it = setting(case, precision)
    for batch in BATCHES:
        with seen_by_layers(it.template, FAMILIES[type(it.whole.model).__name__]) as seen:
            logits = streamed_logits(it.template, it.homes(precision), batch)
        for name, parameter in it.whole.model.named_parameters():
            assert torch.equal(seen[name], parameter), f"{case}: {name} is bound to something else"
        assert logits.isfinite().all(), f"{case}: not every logit is finite"
        assert torch.equal(logits, whole_logits(it.whole, batch)), f"{case}: {where_they_part(it, precision, batch)}"


@contextmanager
def between(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """While entered: the hidden states that the layers get, in order, and what the last one gives."""
    seen: list[Tensor] = []

    def enter(_layer: nn.Module, given: tuple[Tensor, ...], words: dict[str, Tensor]) -> None:
        seen.append((given[0] if given else words["hidden_states"]).detach().clone())

    def leave(_layer: nn.Module, _given: Any, out: Tensor | tuple[Tensor, ...]) -> None:
        seen.append((out[0] if isinstance(out, tuple) else out).detach().clone())

    handles = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    handles.append(layers[-1].register_forward_hook(leave))
    yield seen
    for handle in handles:
        handle.remove()


def where_they_part(it: Setting, precision: str, batch: TokenBatch) -> str:
    """The first part of the model whose result is not the streamed one."""
    family = FAMILIES[type(it.whole.model).__name__]
    with between(it.template._layers) as ours:
        streamed_logits(it.template, it.homes(precision), batch)
    with between(it.whole.model.get_submodule(f"{family.backbone}.{family.layers}")) as theirs:
        whole_logits(it.whole, batch)
    differ = [index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]
    if not differ:
        part = (
            f"what follows the last layer, of {', '.join(sorted(it.template.tail_names | it.template.output_names))},"
        )
    else:
        part = f"layer {differ[0] - 1}" if differ[0] else "what comes before the first layer"
    return f"{part} gives other numbers from the same weights"


def whole_logits(whole: reference.Whole, batch: TokenBatch) -> Tensor:
    """The model's own forward, output layer included."""
    whole.packing.lengths_tokens = reference.lengths_of(batch)
    inputs = {"input_ids": batch.input_ids_T[None], "position_ids": batch.position_ids_T[None], "use_cache": False}
    return whole.model(**inputs, attention_mask=reference.masks_of(whole.model.config, batch)).logits


@each_case
@pytest.mark.parametrize(
    ("precision", "keep"),
    [
        ("fp32", True),
        ("bf16", False),
        pytest.param("fp32", False, marks=pytest.mark.slow),  # test_families_train goes these ways
        pytest.param("bf16", True, marks=pytest.mark.slow),
    ],
    ids=["fp32-keep", "bf16-recompute", "fp32-recompute", "bf16-keep"],
)
def test_gradients_are_whole_model_autograd(case: str, precision: str, keep: bool) -> None:
    it = setting(case, precision)
    homes = it.homes(precision)
    scale = 1.0 / sum(int((b.labels_T >= 0).sum()) for b in BATCHES)
    loss = streamed_step(it.template, homes, BATCHES, scale, CHUNK_TOKENS, keep)
    sums = {name: torch.zeros(p.shape) for name, p in it.whole.model.named_parameters()}
    want = sum(float(reference.add_gradients(it.whole, b, sums, scale, CHUNK_TOKENS)) for b in BATCHES)
    streamed = homes.gradients()
    assert streamed.keys() == sums.keys(), f"{case}: tensors with a gradient: {streamed.keys() ^ sums.keys()}"
    for name, expected in reversed(sums.items()):  # in the order of the backward: what is wrong spreads from there
        assert torch.equal(streamed[name], expected), f"{case}: the gradient of {name}"
        assert expected.abs().max() > 0, f"{case}: {name} has no gradient: the comparison says nothing"
    assert loss == want, f"{case}: the loss"


def logits_beside(case: str, template: ModelTemplate) -> tuple[Tensor, Tensor]:
    """Logits of one pack, and of the same with other tokens in its first document (the first 20)."""
    it, first = setting(case, "fp32"), BATCHES[0]
    changed = first._replace(input_ids_T=torch.cat([(first.input_ids_T[:20] + 1) % 96, first.input_ids_T[20:]]))
    before, after = (streamed_logits(template, it.homes("fp32"), batch) for batch in (first, changed))
    assert not torch.equal(before[:, 19], after[:, 19])
    return before[:, 20:], after[:, 20:]


@each_case
def test_documents_of_a_pack_do_not_see_each_other(case: str) -> None:
    """Other tokens in one document leave the next one's logits: bit for bit, unless experts round by their load."""
    before, after = logits_beside(case, setting(case, "fp32").template)
    if case in WITH_EXPERTS:
        torch.testing.assert_close(before, after, rtol=0.0, atol=EXPERT_SPREAD)
    else:
        assert torch.equal(before, after), f"{case}: tokens of one document change another's logits"


class RowByRow(TorchDispatchMode):
    """Matrix products of one row at a time: a row's bits cannot depend on how many others there are."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        left = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}.get(func)
        if left is None or args[left].shape[0] < 2:
            return func(*args, **(kwargs or {}))
        rows = [func(*args[:left], row, *args[left + 1 :], **(kwargs or {})) for row in args[left].split(1)]
        return torch.cat(rows)


@pytest.mark.parametrize("case", mostly_slow(WITH_EXPERTS, "gpt_oss", "deepseek_v3", "laguna", "mimo_v2_flash"))
def test_only_the_load_of_experts_lets_documents_differ(case: str) -> None:
    """With a product that does not round by its number of rows, documents with experts stay apart bit for bit too."""
    template = ModelTemplate(tiny_config(case, experts_implementation="eager"), CPU, torch.float32)
    fill_buffers(template, setting(case, "fp32").buffers)
    with RowByRow():
        before, after = logits_beside(case, template)
    assert torch.equal(before, after), f"{case}: tokens of one document change another's logits"


@each_case
def test_a_packed_document_is_as_alone_under_the_frameworks_own_attention(case: str) -> None:
    """An independent truth for masks, windows, chunks, caps, sinks and recurrent layers: eager code, one document."""
    it = setting(case, "fp32", "eager")
    packed = streamed_logits(it.template, it.homes("fp32"), BATCHES[0])[0]
    start = 0
    for length in (20, 12, 5):
        ids = BATCHES[0].input_ids_T[None, start : start + length]
        it.whole.packing.lengths_tokens = (length,)
        alone = it.whole.model(input_ids=ids, use_cache=False).logits[0]
        told = f"{case}: the document of {length} tokens has other logits than alone"
        torch.testing.assert_close(
            packed[start : start + length], alone, rtol=1e-4, atol=1e-4, msg=lambda text, told=told: f"{told}: {text}"
        )
        start += length


@pytest.mark.parametrize(("case", "feature"), FEATURES)
def test_feature_is_alive(case: str, feature: str) -> None:
    """Its setting switched off changes the logits."""
    it = setting(case, "fp32")
    without = ModelTemplate(tiny_config(case, **CASES[case].features[feature]), CPU, torch.float32)
    fill_buffers(without, it.buffers)
    masters = tiny_masters(without.spec) | it.masters  # it may have a tensor more, or less
    logits = streamed_logits(without, Homes(without, masters, "fp32"), BATCHES[0])
    same = torch.equal(logits, streamed_logits(it.template, it.homes("fp32"), BATCHES[0]))
    assert not same, f"{case}: {feature}: as if it were switched off"

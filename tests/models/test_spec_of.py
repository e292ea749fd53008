"""model_spec: names, segments, decay, ties, attention shapes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    CTRLConfig,
    Gemma3Config,
    GPT2Config,
    GPTBigCodeConfig,
    LlamaConfig,
    PreTrainedConfig,
    ReformerConfig,
    T5Config,
)

from megatrain.errors import ConfigError, ModelError
from megatrain.models import attention
from megatrain.models.meta import meta_model
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from tests.families import CASES, FAMILIES, tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_the_real_models(family: str) -> None:
    spec = model_spec(tiny_config(family))
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    real = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {t.name: t.shape for s in spec.segments for t in s.tensors} == real
    assert spec.num_parameters == model.num_parameters()
    assert spec.tied == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert [s.name for s in spec.segments] == ["EMBED", *(f"L{i:03d}" for i in range(len(spec.blocks))), "HEAD"]
    assert [s.kind for s in spec.segments] == ["embed", *("block" for _ in spec.blocks), "head"]
    for index, block in enumerate(spec.blocks):
        assert {t.local for t in block.tensors} == {n for n, _ in model.model.layers[index].named_parameters()}
        assert all(t.name == f"model.layers.{index}.{t.local}" for t in block.tensors)
    assert (spec.hidden_size, spec.vocab_size, spec.max_positions) == (64, 96, 128)


@pytest.mark.parametrize("family", FAMILIES)
def test_decay_spares_norms_and_biases_only(family: str) -> None:
    tensors = [t for s in model_spec(tiny_config(family)).segments for t in s.tensors]
    assert {t.name for t in tensors if not t.decay} == {
        t.name for t in tensors if "norm" in t.name or t.name.endswith("bias")
    }
    assert all(t.trainable for t in tensors)


def test_locals_are_relative_to_what_they_are_bound_to() -> None:
    spec = model_spec(tiny_config("llama"))
    assert [t.local for t in spec.segments[0].tensors] == ["embed_tokens.weight"]
    assert [t.local for t in spec.segments[-1].tensors] == ["norm.weight", "lm_head.weight"]
    assert [t.local for t in model_spec(tiny_config("smollm2")).segments[-1].tensors] == ["norm.weight"]


@pytest.mark.parametrize(
    ("family", "windows"),
    [
        ("llama", [None, None, None]),
        ("qwen2", [None, 8, 8]),
        ("qwen3", [None, None]),
        ("mistral", [8, 8]),
        ("gemma3", [8, 8, None]),
    ],
)
def test_attention_shapes(family: str, windows: list[int | None]) -> None:
    shapes = model_spec(tiny_config(family)).attention
    assert [s.window_tokens for s in shapes] == windows
    assert {(s.num_heads, s.head_size) for s in shapes} == {(4, 32 if family == "qwen3" else 16)}


def test_active_parameters_leave_out_a_table_that_is_only_looked_up() -> None:
    untied, tied = model_spec(tiny_config("llama")), model_spec(tiny_config("smollm2"))
    assert untied.active_parameters == untied.num_parameters - 96 * 64
    assert tied.active_parameters == tied.num_parameters


def test_freeze_marks_matching_tensors() -> None:
    spec = model_spec(tiny_config("llama"), freeze=[r"layers\.[01]\.", r"^lm_head"])
    frozen = {t.name for s in spec.segments for t in s.tensors if not t.trainable}
    assert frozen == {t.name for s in (*spec.segments[1:3], spec.segments[-1]) for t in s.tensors} - {
        "model.norm.weight"
    }


def test_config_is_not_changed() -> None:
    config = tiny_config("gemma3")
    before = config.to_dict()
    model_spec(config)
    assert config.to_dict() == before


def dropout() -> PreTrainedConfig:
    return LlamaConfig(num_hidden_layers=1, hidden_size=64, attention_dropout=0.1)


def bidirectional() -> PreTrainedConfig:
    config = tiny_config("gemma3")
    config.use_bidirectional_attention = True
    return config


def windows_of_qwen2_moe() -> PreTrainedConfig:
    return tiny_config("qwen2_moe", use_sliding_window=True, sliding_window=8, max_window_layers=1)


def batched_experts() -> PreTrainedConfig:
    config = tiny_config("mixtral")
    config._experts_implementation = "batched_mm"
    return config


def classifier() -> PreTrainedConfig:
    return LlamaConfig(num_hidden_layers=1, hidden_size=64, architectures=["LlamaForSequenceClassification"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (ReformerConfig(), ["ReformerModelWithLMHead", "allow_unproven: true"]),
        (BloomConfig(), ["BloomForCausalLM", "ALiBi"]),
        (Gemma3Config(), ["Gemma3ForConditionalGeneration", "text model"]),
        (T5Config(), ["'t5'", "decoder-only"]),
        (BertConfig(), ["BertLMHeadModel", "encoder"]),
        (classifier(), ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        (dropout(), ["attention_dropout 0.1", "0.0"]),
        (GPT2Config(n_layer=1, n_embd=64, n_head=4), ["pdrop 0.1", "0.0"]),
        (batched_experts(), ["batched_mm", "grouped_mm"]),
        (windows_of_qwen2_moe(), ["window", "use_sliding_window"]),
        (bidirectional(), ["use_bidirectional_attention", "false"]),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_refused_by_name_with_a_remedy(config: PreTrainedConfig, words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        model_spec(config)
    assert all(word in str(error.value) for word in words), error.value


def test_unproven_architecture_that_is_laid_out_otherwise_is_refused() -> None:
    config = CTRLConfig(n_layer=1, n_embd=64, n_head=4, dff=64, vocab_size=96, resid_pdrop=0.0, embd_pdrop=0.0)
    with pytest.raises(ModelError, match="no submodule 'model'"):
        model_spec(config, allow_unproven=True)


def test_an_architecture_refused_with_a_reason_stays_refused() -> None:
    with pytest.raises(ModelError, match="ALiBi"):
        model_spec(BloomConfig(n_layer=1, hidden_size=64, n_head=4), allow_unproven=True)


def test_recurrent_layers_under_another_name_are_refused() -> None:
    """No layer of the class that must run document by document: perhaps the library renamed it."""
    config = tiny_config("qwen3_next", layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match=r"Qwen3NextGatedDeltaNet.*leak"):
        ModelTemplate(config, torch.device("cpu"), torch.float32)


def test_a_residual_in_fp32_needs_precision_fp32() -> None:
    config = tiny_config("mamba2", residual_in_fp32=True)
    model_spec(config)
    with pytest.raises(ModelError, match=r"residual_in_fp32.*precision fp32"):
        ModelTemplate(config, torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("case", CASES)
def test_attention_shapes_are_what_the_layers_ask_for(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, sizes and windows of the spec against the calls of the operator itself."""
    template = ModelTemplate(tiny_config(case), torch.device("cpu"), torch.float32)
    homes = Homes(template, tiny_masters(template.spec), "fp32")
    seen: list[tuple[int, int, int, int]] = []
    given: list[attention.Attended] = []

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, **settings: Any) -> object:
        seen.append((q.shape[1], q.shape[3], v.shape[3], settings["window"]))
        given.append(attention_operator(q, k, v, *args, **settings))
        return given[-1]

    attention_operator = attention.attention
    monkeypatch.setattr(attention, "attention", noted)
    h, calls = template.embed(homes.own("EMBED"), tiny_batch([12, 8]))
    for index, (block, shape) in enumerate(zip(template.spec.blocks, template.spec.attention, strict=True)):
        seen.clear()
        given.clear()
        template.block(index, homes.fetch(block.name, 0), h, calls)
        num_visits = 2 if shape.num_calls is None else 1  # of the attention: one a document, or one for all
        assert len(given) == (0 if shape.num_heads == 0 else shape.num_calls or num_visits)
        if shape.can_be_kept:
            out_1THE, lse_1HT = given[0]
            assert (out_1THE[0, 0].numel(), lse_1HT[0, :, 0].numel()) == shape.kept_elements
        if shape.num_heads == 0:
            assert seen == []
        else:
            assert sum(heads for heads, *_ in seen) == num_visits * shape.num_heads
            assert {call[1:] for call in seen} == {(shape.head_size, shape.value_size, shape.window_tokens or 0)}


@pytest.mark.parametrize(
    ("freeze", "words"),
    [(["no_such_tensor"], "matches no parameter"), (["("], "not a regular expression"), ([""], "every parameter")],
)
def test_bad_freeze_is_refused(freeze: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_spec(tiny_config("llama"), freeze=freeze)


@pytest.mark.parametrize("family", ["mixtral", "llama4", "granitemoe"])  # made with torch.empty, zeros and randn
def test_experts_larger_than_ram_take_none_and_buffers_stay_real(family: str) -> None:
    config = tiny_config(family, intermediate_size=2**42)
    experts = max((t for s in model_spec(config).segments for t in s.tensors), key=lambda t: t.num_elements)
    assert len(experts.shape) == 3
    assert 4 * experts.num_elements > 2**50  # bytes, more than a process can even address
    large, small = (meta_model(c, torch.float32, "eager", False)[0] for c in (config, tiny_config(family)))
    assert all(parameter.is_meta for parameter in large.parameters())
    buffers = dict(large.named_buffers())
    assert buffers.keys() == dict(small.named_buffers()).keys()
    assert all(torch.equal(buffers[name], buffer) for name, buffer in small.named_buffers())


def test_a_buffer_that_is_as_large_is_refused_by_name() -> None:
    config = GPTBigCodeConfig(n_layer=1, n_embd=64, n_head=4, vocab_size=96, n_positions=2**15)
    with pytest.raises(ModelError, match=r"GPTBigCodeForCausalLM.*buffer, transformer\.bias of 1,024 MiB.*lower"):
        model_spec(config, allow_unproven=True)


def test_building_leaves_the_next_module_real() -> None:
    model_spec(tiny_config("llama"))
    assert not torch.nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(
    ("family", "embedding_copies", "tail_flows", "logit_copies"),
    [
        ("llama", 0, 3, 0), ("gemma3", 1, 4, 3), ("gemma2", 1, 4, 3), ("gpt2", 0, 1, 0), ("cohere", 0, 6, 1),
        ("nanochat", 4, 2, 3), ("recurrent_gemma", 1, 4, 3), ("afmoe", 1, 4, 0), ("mamba", 0, 3, 1),
        ("granite", 1, 3, 1),
    ],
)  # fmt: skip
def test_what_the_ends_of_a_model_make_besides_is_counted(
    family: str, embedding_copies: int, tail_flows: int, logit_copies: int
) -> None:
    spec = model_spec(tiny_config(family))
    assert (spec.embedding_copies, spec.tail_flows, spec.logit_copies) == (embedding_copies, tail_flows, logit_copies)

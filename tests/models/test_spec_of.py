"""model_spec: names, segments, decay, ties, attention shapes, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma3Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    T5Config,
)

from megatrain.errors import ConfigError, ModelError
from megatrain.models.spec_of import model_spec
from tests.families import FAMILIES, tiny_config


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


def classifier() -> PreTrainedConfig:
    return LlamaConfig(num_hidden_layers=1, hidden_size=64, architectures=["LlamaForSequenceClassification"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GPT2Config(n_layer=1, n_embd=64), ["GPT2LMHeadModel", "--allow-unproven-architecture"]),
        (Gemma3Config(), ["Gemma3ForConditionalGeneration", "--allow-unproven-architecture"]),
        (T5Config(), ["'t5'", "decoder-only"]),
        (BertConfig(), ["BertLMHeadModel", "--allow-unproven-architecture"]),
        (classifier(), ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        (dropout(), ["dropout 0.1", "0.0"]),
        (bidirectional(), ["use_bidirectional_attention", "false"]),
    ],
    ids=["gpt2", "gemma3-vision", "t5", "bert", "classifier", "dropout", "bidirectional"],
)
def test_refused_by_name_with_a_remedy(config: PreTrainedConfig, words: list[str]) -> None:
    with pytest.raises(ModelError) as error:
        model_spec(config)
    assert all(word in str(error.value) for word in words), error.value


def test_unproven_architecture_that_is_laid_out_otherwise_is_refused() -> None:
    with pytest.raises(ModelError, match="no submodule 'model'"):
        model_spec(
            GPT2Config(n_layer=1, n_head=4, n_embd=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0), allow_unproven=True
        )


@pytest.mark.parametrize(
    ("freeze", "words"),
    [(["no_such_tensor"], "matches no parameter"), (["("], "not a regular expression"), ([""], "every parameter")],
)
def test_bad_freeze_is_refused(freeze: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        model_spec(tiny_config("llama"), freeze=freeze)


def test_building_leaves_the_next_module_real() -> None:
    model_spec(tiny_config("llama"))
    assert not torch.nn.Linear(2, 2).weight.is_meta

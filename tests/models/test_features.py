"""Each special feature of a family is alive in its tiny config: switching it off changes the streamed logits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from megatrain.models.template import ModelTemplate
from tests.families import tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits

BATCH = tiny_batch([20, 12, 5])
Masters = dict[str, np.ndarray]


def logits_of(config: PreTrainedConfig, masters: Masters) -> Tensor:
    template = ModelTemplate(config, torch.device("cpu"), torch.float32)
    return streamed_logits(template, Homes(template, masters, "fp32"), BATCH)


def wide_window(config: PreTrainedConfig) -> None:
    config.sliding_window = 64


def plain_rotary(config: PreTrainedConfig) -> None:
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}


def same_rotary(config: PreTrainedConfig) -> None:
    config.rope_parameters = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in config.layer_types}


def no_soft_cap(config: PreTrainedConfig) -> None:
    config.final_logit_softcapping = None


def no_windows(config: PreTrainedConfig) -> None:
    config.layer_types = ["full_attention"] * len(config.layer_types)


def other_scale(config: PreTrainedConfig) -> None:
    config.query_pre_attn_scalar = 16


@pytest.mark.parametrize(
    ("family", "switch_off"),
    [
        ("llama", plain_rotary),
        ("qwen2", wide_window),
        ("qwen2", no_windows),
        ("mistral", wide_window),
        ("gemma3", wide_window),
        ("gemma3", no_windows),
        ("gemma3", same_rotary),
        ("gemma3", no_soft_cap),
        ("gemma3", other_scale),
    ],
)
def test_setting_matters(family: str, switch_off: Callable[[PreTrainedConfig], None]) -> None:
    plain, without = tiny_config(family), tiny_config(family)
    switch_off(without)
    masters = tiny_masters(ModelTemplate(plain, torch.device("cpu"), torch.float32).spec)
    assert not torch.equal(logits_of(plain, masters), logits_of(without, masters))


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("qwen2", "q_proj.bias"),
        ("qwen2", "k_proj.bias"),
        ("qwen2", "v_proj.bias"),
        ("qwen3", "q_norm.weight"),
        ("qwen3", "k_norm.weight"),
        ("gemma3", "q_norm.weight"),
        ("gemma3", "post_feedforward_layernorm.weight"),
    ],
)
def test_tensor_of_the_last_layer_matters(family: str, part: str) -> None:
    """One tensor of the last layer zeroed: the spec has it, the template binds it, the logits feel it."""
    config = tiny_config(family)
    masters = tiny_masters(ModelTemplate(config, torch.device("cpu"), torch.float32).spec)
    name = f"model.layers.{config.num_hidden_layers - 1}.self_attn.{part}".replace("self_attn.post", "post")
    assert not torch.equal(logits_of(config, masters), logits_of(config, masters | {name: 0.0 * masters[name]}))


def test_gemma_scales_its_embedding() -> None:
    template = ModelTemplate(tiny_config("gemma3"), torch.device("cpu"), torch.float32)
    homes = Homes(template, tiny_masters(template.spec), "fp32")
    h, _ = template.embed(homes.own("EMBED"), BATCH)
    rows = homes.own("EMBED")["embed_tokens.weight"][BATCH.input_ids_T]
    assert torch.equal(h[0], rows * 8.0)  # sqrt(64)


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "gemma3"])
def test_tied_head_reads_the_embedding(family: str) -> None:
    """A row of the embedding that no input uses changes that token's logit, and no other."""
    config = tiny_config(family)
    masters = tiny_masters(ModelTemplate(config, torch.device("cpu"), torch.float32).spec)
    changed = masters["model.embed_tokens.weight"].copy()
    changed[0] *= 2  # token 0 is in no tiny batch
    before, after = logits_of(config, masters), logits_of(config, masters | {"model.embed_tokens.weight": changed})
    assert not torch.equal(before[..., 0], after[..., 0])
    assert torch.equal(before[..., 1:], after[..., 1:])

"""Features that no setting switches: the scale of an embedding, a head that reads it, correction of scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from megatrain.models.families import FAMILIES
from megatrain.models.meta import architecture_of
from megatrain.models.template import ModelTemplate
from tests.families import CASES, tiny_batch, tiny_config, tiny_masters
from tests.models.streamed import Homes, streamed_logits

BATCH = tiny_batch([20, 12, 5])
Masters = dict[str, np.ndarray]


def logits_of(config: PreTrainedConfig, masters: Masters) -> Tensor:
    template = ModelTemplate(config, torch.device("cpu"), torch.float32)
    return streamed_logits(template, Homes(template, masters, "fp32"), BATCH)


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


# What Family.special says of settings -> the word that the feature has which switches it off.
SWITCHES = {
    "window": "window", "soft-capped": "soft-cap", "YaRN": "yarn", "Llama 3": "llama3", "dynamic": "dynamic",
    "linear": "linear", "multiplier": "multiplier", "layers without rotary": "layer without rotary",
    "partial rotary": "partial rotary", "rotary by layer": "rotary by layer", "two rotary tables": "two rotary tables",
    "long rotary": "long rotary", "expert groups": "groups", "logit scale": "logit scale", "chunked": "chunks",
    "temperature": "temperature", "clipped": "clipped", "scale by layer": "scale by layer",
    "query scale": "query scale", "experts": "a token", "upper layers": "which layers",
}  # fmt: skip
NOT_SWITCHED = {"Llama4ForCausalLM": {"experts"}, "Qwen2MoeForCausalLM": set()}  # one expert a token is what it has


def test_every_setting_that_is_special_is_switched_off_once() -> None:
    """What is special and no setting (biases, norms, projections) is weights: each has a gradient, or a test fails."""
    features: dict[str, set[str]] = {}
    for case in CASES:
        features.setdefault(architecture_of(tiny_config(case)), set()).update(CASES[case].features)
    for architecture, labels in features.items():
        for words, switch in SWITCHES.items():
            if words in FAMILIES[architecture].special and words not in NOT_SWITCHED.get(architecture, set()):
                assert any(switch in label for label in labels), (architecture, words)


CORRECTED = [
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1", "solar_open", "exaone_moe", "ernie4_5_moe", "minimax_m2"),
    *("hy_v3", "mimo_v2_flash", "kolibri1", "axk1", "longcat_flash", "kimi_linear", "afmoe", "lfm2_moe", "nemotron_h"),
    "laguna",
]


@pytest.mark.parametrize("case", [case for case in CORRECTED if case in CASES])
def test_saved_buffers_reach_the_router(case: str) -> None:
    """Score corrections are saved buffers, of their own dtype; other values choose other experts."""
    template = ModelTemplate(tiny_config(case), torch.device("cpu"), torch.bfloat16)
    homes = Homes(template, tiny_masters(template.spec), "bf16")
    assert template.saved_buffers
    if case in ("deepseek_v3", "glm4_moe", "ernie4_5_moe"):  # these insist on fp32 in every version of transformers
        assert {buffer.dtype for buffer in template.saved_buffers.values()} == {torch.float32}
    assert not template.saved_buffers.keys() & {t.name for s in template.spec.segments for t in s.tensors}
    before = streamed_logits(template, homes, BATCH)
    for buffer in template.saved_buffers.values():
        buffer.flatten()[0] += 4.0
    assert not torch.equal(before, streamed_logits(template, homes, BATCH))

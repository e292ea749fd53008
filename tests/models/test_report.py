"""docs/models.json and models.md say what the program does: the registry, each family with tests of every kind."""

from __future__ import annotations

import json

import pytest

from megatrain.models.families import FAMILIES, REFUSED
from tests.models import report

DOCUMENT = json.loads(report.JSON.read_text("utf-8"))["families"]
KINDS = {
    "test_logits_are_the_models_own": ("fp32", "bf16"),
    "test_gradients_are_whole_model_autograd": ("fp32-keep", "fp32-recompute", "bf16-keep", "bf16-recompute"),
    "test_three_steps_are_the_references": ("fp32", "bf16"),
    "test_documents_of_a_pack_do_not_see_each_other": ("",),
    "test_a_packed_document_is_as_alone_under_the_frameworks_own_attention": ("",),
    "test_written_folder_opens_in_transformers": ("",),
}


ASKED_FOR = {
    "Llama4ForCausalLM", "MinistralForCausalLM", "Ministral3ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
    "PhiForCausalLM", "Phi3ForCausalLM", "Olmo3ForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM",
    "Glm4MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM", "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "MiniMaxForCausalLM", "MiniMaxM2ForCausalLM",
    "Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM", "NemotronForCausalLM", "NemotronHForCausalLM",
    "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM", "SeedOssForCausalLM", "Exaone4ForCausalLM",
    "Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Mamba2ForCausalLM", "FalconH1ForCausalLM",
}  # fmt: skip


def test_families_that_people_ask_for_are_accepted_or_refused_with_a_reason() -> None:
    assert FAMILIES.keys() >= ASKED_FOR
    assert "T x T" in REFUSED["FalconForCausalLM"]


def test_page_lists_what_is_accepted_and_what_is_refused() -> None:
    assert {name for name, entry in DOCUMENT.items() if entry["status"] == "accepted"} == FAMILIES.keys()
    assert {name: entry["reason"] for name, entry in DOCUMENT.items() if entry["status"] == "refused"} == REFUSED
    assert report.MARKDOWN.read_text("utf-8") == report.markdown(json.loads(report.JSON.read_text("utf-8")))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_accepted_family_passed_every_kind_of_test(architecture: str) -> None:
    tests = DOCUMENT[architecture]["tests"]
    for kind, ways in KINDS.items():
        for way in ways:
            assert any(f"::{kind}[" in test and way in test for test in tests), (kind, way)

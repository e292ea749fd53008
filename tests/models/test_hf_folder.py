"""Model folders that transformers cannot use: one sentence with the file, the reason and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from megatrain.errors import ModelError
from megatrain.models.hf_folder import read_hf_config, read_tokenizer
from megatrain.models.spec_of import model_spec

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def _folder(path: Path, text: str) -> Path:
    (path / "config.json").write_text(text)
    return path


def _spec(path: Path, **changes: Any) -> None:
    model_spec(read_hf_config(_folder(path, json.dumps(GOOD | changes))))


def test_a_good_folder_is_read(tmp_path: Path) -> None:
    config = read_hf_config(_folder(tmp_path, json.dumps(GOOD)))
    assert isinstance(config, LlamaConfig)
    assert config.hidden_size == 64


def test_no_folder_is_refused_with_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no folder with a config\.json; give the folder of a model"):
        read_hf_config(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", "null", '{"model_type": "frobnicate"}', '{"model_type": 5}'])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    sentence = r"config\.json: transformers cannot use it .*; fetch the model again"
    with pytest.raises(ModelError, match=sentence) as error:
        read_hf_config(_folder(tmp_path, text))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 800


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": "four"},
        {"num_attention_heads": 3},
        {"num_attention_heads": 0},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**9},
        {"hidden_act": "frobnicate"},
        {"rope_parameters": {"rope_type": "frobnicate", "rope_theta": 1.0}},
        {"vocab_size": -5},
        {"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "frobnicate"},
    ],
    ids=str,
)
def test_a_config_with_a_wrong_value_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="again"):
        _spec(tmp_path, **changes)


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"version": "1.0", "model": {"type": "Frobnicate"}}'])
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, text: str | None) -> None:
    _folder(tmp_path, json.dumps(GOOD))
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"its tokenizer cannot be read .*; fetch tokenizer\.json") as error:
        read_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 800

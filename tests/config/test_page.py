"""The schema and the starter are what the reader accepts."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from megatrain.config import RunConfig, read_config
from megatrain.config_page import config_schema, starter
from megatrain.config_spellings import ALIASES, BATCH_FACTORS
from megatrain.config_yaml import parse_mapping

CHECK = jsonschema.Draft202012Validator(config_schema())


def complaints(text: str) -> list[str]:
    """What an editor would underline."""
    table = {key: item.value for key, item in parse_mapping(text.encode(), "text").items()}
    return [error.message for error in CHECK.iter_errors(table)]


def test_the_schema_is_one_and_knows_every_spelling() -> None:
    jsonschema.Draft202012Validator.check_schema(config_schema())
    keys = config_schema()["properties"]
    assert keys.keys() == {*RunConfig.model_fields, *ALIASES, *BATCH_FACTORS}
    assert all(shape["description"] for shape in keys.values())


@pytest.mark.parametrize(
    "text",
    [
        "model: a\ndataset: b\nmemory: {hbm: 24GiB}\n",
        "model: a\ndataset: [b, {path: c, repeat: 2}]\nfreeze: embed\nreport_to: none\n",
        "base_model: a\ntrain_file: b\nlr: 1\nmicro_batch_size: 2\nreport_to: [wandb]\ntrain_roles: user\n",
        RunConfig(model="a", dataset="b").to_yaml(),
        starter("m", "d.jsonl", "e.jsonl", "run.yaml"),
    ],
)
def test_the_schema_accepts_what_the_reader_accepts(text: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text, "utf-8")
    read_config(tmp_path / "c.yaml")
    assert complaints(text) == []


@pytest.mark.parametrize(
    "line",
    ["lerning_rate: 1", "max_length: 1", "memory: {hbm: 24}", "report_to: mlflow", "dataset: [{pth: a}]", "seed: a"],
)
def test_the_schema_refuses_what_the_reader_refuses(line: str) -> None:
    assert complaints(line)


def test_the_starter_asks_for_rows_as_long_as_it_is_told() -> None:
    assert "\nmax_length: 512\n" in starter("m", "d.jsonl", None, "run.yaml", 512)


def test_the_starter_is_a_config_and_says_its_own_name(tmp_path: Path) -> None:
    text = starter("/models/a: b", "d.jsonl", None, "first.yaml")
    (tmp_path / "c.yaml").write_text(text, "utf-8")
    config = read_config(tmp_path / "c.yaml")
    assert (config.model, config.dataset, config.output_dir) == ("/models/a: b", "d.jsonl", "runs/first")
    assert "megatrain plan first.yaml" in text

"""Configs of other tools, as people have them, against what they become; nothing is dropped in silence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatrain.config import read_config
from megatrain.errors import ConfigError
from megatrain.importers import import_config

FILES = Path(__file__).with_name("files")
TOOL_OF = {
    "llamafactory": "llamafactory",
    "llamafactory_lora": "llamafactory",
    "axolotl": "axolotl",
    "paper": "megatrain-paper",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files, in the working folder, so that paths in the golden texts are short."""
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", TOOL_OF)
def test_golden(name: str) -> None:
    imported = import_config(Path(f"{name}.yaml"), "auto")
    assert imported.tool == TOOL_OF[name]
    assert imported.text == (FILES / f"{name}.golden").read_text("utf-8")
    assert import_config(Path(f"{name}.yaml"), imported.tool) == imported


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", TOOL_OF)
def test_what_is_written_is_a_config(name: str) -> None:
    Path("ours.yaml").write_text(import_config(Path(f"{name}.yaml"), "auto").text, "utf-8")
    assert read_config(Path("ours.yaml")).max_length in (512, 2048, 4096)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", TOOL_OF)
def test_every_key_with_a_value_is_taken_or_said(name: str) -> None:
    """A key nobody knows, appended to any of the files, is listed with a reason."""
    with Path(f"{name}.yaml").open("a") as file:
        file.write("frobnicate: 7\noff_switch: false\nempty:\n")
    lost = import_config(Path(f"{name}.yaml"), "auto").lost
    assert lost["frobnicate: 7"] == "MegaTrain has no such key"
    assert not any(key.startswith(("off_switch", "empty")) for key in lost)


@pytest.mark.parametrize(
    ("line", "ours", "lost"),
    [
        ("lr_scheduler_type: inverse_sqrt", {"lr_scheduler_type": "cosine"}, "lr_scheduler_type: inverse_sqrt"),
        ("lr_scheduler_type: constant_with_warmup\nwarmup_steps: 5", {"lr_scheduler_type": "constant"}, None),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.2}", {"min_lr_ratio": 0.2}, None),
        ("warmup_steps: 5\nwarmup_ratio: 0.1", {"warmup_steps": 5, "warmup_ratio": 0.0}, None),
        ("max_steps: -1", {"max_steps": None}, None),
        ("eval_strategy: no\neval_steps: 5", {"eval_steps": None}, None),
        ("eval_strategy: epoch", {"eval_steps": None}, "eval_strategy: epoch"),
        ("save_steps: 0.1", {"save_steps": 500}, "save_steps: 0.1"),
        ("save_strategy: epoch", {"save_strategy": "steps"}, "save_strategy: epoch"),
        ("optim: adamw_torch", {}, None),
        ("optim: adafactor", {}, "optimizer: adafactor"),
        ("report_to: [tensorboard, mlflow]", {"report_to": ["tensorboard"]}, "report_to: mlflow"),
        ("train_on_prompt: true", {"assistant_only_loss": False}, None),
        ("stage: dpo", {}, "stage: dpo"),
    ],
)
def test_single_keys(tmp_path: Path, line: str, ours: dict[str, object], lost: str | None) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model_name_or_path: m\ndataset: d\nfinetuning_type: full\n{line}\n")
    imported = import_config(path, "auto")
    path.write_text(imported.text, "utf-8")
    config = read_config(path).model_dump()
    assert {key: config[key] for key in ours} == ours
    assert set(imported.lost) - {"dataset: d", "number of GPUs"} == ({lost} if lost else set())


def test_keys_of_rows_that_are_ours_and_names_of_the_hub_are_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "base_model: a\nsequence_len: 8\ndatasets:\n"
        "  - {path: org/name, field_messages: messages, message_field_role: who}\n"
        "  - {path: org/rows.jsonl, field_output: output, field: story}\n"
    )
    lost = [name for name in import_config(path, "auto").lost if name.startswith("datasets")]
    assert lost == [
        "datasets: org/name: message_field_role",
        "datasets: org/rows.jsonl",
        "datasets: org/rows.jsonl: field",
    ]


@pytest.mark.parametrize(
    ("text", "tool", "message"),
    [
        ("model: a\n", "auto", "cannot tell whose config this is; name the tool with --from llamafactory"),
        ("model: a\ndataset: b\n", "auto", "model and dataset are MegaTrain's own keys; train with it as it is"),
        ("model: a\n", "trl", "--from is 'trl'; use auto, llamafactory, axolotl, megatrain-paper"),
        ("base_model: a\ndatasets: &d []\n", "auto", "line 2: anchors and aliases"),
        ("datasets: [{path: a}]\n", "axolotl", "key 'model' is missing"),
        ("base_model: a\nsequence_len: 1\n", "auto", "key 'dataset' is missing"),
    ],
)
def test_refusals(tmp_path: Path, text: str, tool: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        import_config(path, tool)
    assert message in str(error.value)

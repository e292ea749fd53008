"""Names on the hub: from the hub library's cache, as it lays it out, to plain files of one revision. No network."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
from transformers import AutoTokenizer

from megatrain.data.rows import list_files
from megatrain.errors import DataError, ModelError
from megatrain.models.hub import HubName, Kind, fetched, hub_name, revision_of
from tests.cli.test_verbs import megatrain
from tests.conftest import write_rows

ONE, TWO = "1" * 40, "2" * 40


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub library, offline."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def put(hub: Path, repo: str, kind: Kind, files: dict[str, bytes], revision: str = ONE, branch: str = "main") -> None:
    """What the library leaves after a download: blobs, and a snapshot of links to them."""
    root = hub / f"{kind}s--{repo.replace('/', '--')}"
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / branch).write_text(revision)
    for number, (name, content) in enumerate(files.items()):
        blob = root / "blobs" / f"{revision[:8]}{number}"
        blob.write_bytes(content)
        link = root / "snapshots" / revision / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


def test_what_is_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/some.model-1") == HubName("org/some.model-1", None, None)
    assert hub_name("org/name@v1.0") == HubName("org/name", "v1.0", None)
    assert hub_name("org/name@refs/pr/1:main/train") == HubName("org/name", "refs/pr/1", "main/train")
    assert hub_name("org/name:a/train.jsonl") == HubName("org/name", None, "a/train.jsonl")
    local = ("name", "/org/name", "./org/name", "../org/name", "org/name/more", "org/..", "data/train.jsonl", "-", "")
    for text in local:
        assert hub_name(text) is None, text
    (tmp_path / "models/llama").mkdir(parents=True)
    assert hub_name("models/llama") is None
    assert hub_name("models/lama") is None, "a mistyped local path is nobody's business"


def test_a_model_is_plain_files_of_one_revision_and_nothing_that_runs(hub: Path, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"[]", "chat.jinja": b"x"}
    refused = {"pytorch_model.bin": b"pickle", "modeling_evil.py": b"code", "consolidated.safetensors": b"again",
               "onnx/config.json": b"other", "README.md": b"#"}
    put(hub, "org/name", "model", files | refused)
    folder = fetched(HubName("org/name", None, None), "model", tmp_path / "ours")
    assert folder == tmp_path / f"ours/models/org--name@{ONE}"
    assert revision_of(folder) == f"org/name@{ONE}"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert (folder / "model.safetensors").stat().st_nlink == 2, "no second copy on the disk"
    put(hub, "org/name", "model", {**files, "config.json": b"[]"}, revision=TWO)
    assert fetched(HubName("org/name", ONE, None), "model", tmp_path / "ours") == folder
    newer = fetched(HubName("org/name", None, None), "model", tmp_path / "ours")
    assert (newer / "config.json").read_bytes() == b"[]"
    assert (folder / "config.json").read_bytes() == b"{}"


def test_where_hard_links_cannot_be_made_files_are_copied(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    put(hub, "org/name", "model", {"model.safetensors": b"weights"})
    folder = fetched(HubName("org/name", None, None), "model", tmp_path / "ours")
    assert [path.read_bytes() for path in folder.iterdir()] == [b"weights"]


def test_a_snapshot_that_leads_elsewhere_is_refused(hub: Path, tmp_path: Path) -> None:
    put(hub, "org/name", "model", {"model.safetensors": b"w"})
    (tmp_path / "secret.json").write_text("{}")
    (hub / f"models--org--name/snapshots/{ONE}/config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ModelError, match="leads out of the hub's cache"):
        fetched(HubName("org/name", None, None), "model", tmp_path / "ours")


def test_what_is_not_there_offline_is_an_error_with_the_remedy(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model org/name .*hf download org/name\), leave out --offline"):
        fetched(HubName("org/name", None, None), "model", tmp_path / "ours")
    with pytest.raises(DataError, match=r"dataset org/name .*hf download org/name --repo-type dataset"):
        fetched(HubName("org/name", None, None), "dataset", tmp_path / "ours")
    put(hub, "org/pickles", "model", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    with pytest.raises(ModelError, match="holds no safetensors"):
        fetched(HubName("org/pickles", None, None), "model", tmp_path / "ours")


ROW = b'{"text": "a"}\n'


@pytest.mark.parametrize(("names", "inside", "chosen"), [
    (["rows.jsonl", "README.md", "load.py"], None, ["rows.jsonl"]),
    (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
     None, ["data--train-00000-of-00002.parquet", "data--train-00001-of-00002.parquet"]),
    (["train.jsonl", "validation.jsonl", "dataset_infos.json"], None, ["train.jsonl"]),
    (["train.jsonl", "validation.jsonl"], "validation.jsonl", ["validation.jsonl"]),
    (["main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl"], "main", ["main--train.jsonl"]),
    (["constraints.jsonl"], None, ["constraints.jsonl"]),
])
def test_the_files_of_a_dataset_that_are_trained_on(
    hub: Path, tmp_path: Path, names: list[str], inside: str | None, chosen: list[str]
) -> None:
    put(hub, "org/rows", "dataset", dict.fromkeys(names, ROW))
    folder = fetched(HubName("org/rows", None, inside), "dataset", tmp_path / "ours")
    assert [path.name for path in list_files((folder,))] == chosen
    assert revision_of(folder) == f"org/rows@{ONE}"


@pytest.mark.parametrize(("names", "inside"), [
    (["main/train.jsonl", "socratic/train.jsonl"], None), (["a.jsonl", "b.csv"], None), (["train.jsonl"], "valid"),
    (["load.py"], None), (["test.jsonl", "valid.jsonl"], None)])
def test_what_to_train_on_is_not_guessed(hub: Path, tmp_path: Path, names: list[str], inside: str | None) -> None:
    put(hub, "org/rows", "dataset", dict.fromkeys(names, ROW))
    with pytest.raises(DataError, match=r"holds no single set of files .*name one as org/rows:FOLDER_OR_FILE"):
        fetched(HubName("org/rows", None, inside), "dataset", tmp_path / "ours")


def test_a_run_by_names_says_which_revisions_it_used(
    hub: Path, tiny_model: Path, tmp_path: Path, run_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(hub, "org/tiny", "model", {path.name: path.read_bytes() for path in tiny_model.iterdir()})
    put(hub, "org/rows", "dataset", {"data/train.jsonl": write_rows(tmp_path / "rows.jsonl", 20).read_bytes()}, TWO)
    words = ["model=org/tiny", "dataset=org/rows", "eval_dataset=", "eval_steps=", "max_steps=2"]
    assert megatrain("data", "preview", run_config, *words) == 0
    assert megatrain("train", run_config, *words) == 0
    used = json.loads((tmp_path / "run/env.json").read_text())["hub"]
    assert sorted(used.values()) == [f"org/rows@{TWO}", f"org/tiny@{ONE}"]
    assert f"org--tiny@{ONE}" in (tmp_path / "run/config.yaml").read_text()
    assert AutoTokenizer.from_pretrained(tmp_path / "run/checkpoints/step-2/model").chat_template
    capsys.readouterr()
    assert megatrain("train", run_config, "model=org/none", f"output_dir={tmp_path}/none") == 2
    assert "hf download org/none" in capsys.readouterr().err


def test_a_resume_asks_nobody(hub: Path, tiny_model: Path, tmp_path: Path, run_config: Path) -> None:
    put(hub, "org/tiny", "model", {path.name: path.read_bytes() for path in tiny_model.iterdir()})
    words = ["model=org/tiny", "eval_dataset=", "eval_steps=", "max_steps=3", "save_steps=1"]
    assert megatrain("train", run_config, *words) == 0
    shutil.rmtree(hub)
    shutil.rmtree(tmp_path / "run/checkpoints/step-3")
    assert megatrain("resume", tmp_path / "run") == 0
    assert (tmp_path / "run/checkpoints/step-3").is_dir()


@pytest.mark.usefixtures("run_config")
def test_verbs_take_a_name_where_a_folder_is_asked_for(
    hub: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(hub, "org/tiny", "model", {path.name: path.read_bytes() for path in tiny_model.iterdir()})
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    put(hub, "org/rows", "dataset", {"data/test.jsonl": rows.read_bytes()}, TWO)
    cpu = ("device=cpu", "max_length=64")

    def loss(*words: object) -> float:
        capsys.readouterr()
        assert megatrain("eval", *words, *cpu, "--json") == 0
        return json.loads(capsys.readouterr().out)["results"][0]["loss"]

    assert loss("org/tiny", "--dataset", "org/rows") == loss(tiny_model, "--dataset", rows)
    assert loss(f"org/tiny@{ONE}", "--dataset", rows) == loss(tiny_model, "--dataset", rows)
    assert megatrain("chat", "org/tiny", "--raw", "--prompt", "the cat", "--max-tokens", "2", "device=cpu") == 0
    for verb in (("eval", "org/none", "--dataset", rows), ("chat", "org/none"), ("plan", "org/none")):
        capsys.readouterr()
        assert megatrain(*verb) == 2
        error = capsys.readouterr().err
        assert error.startswith("megatrain: model org/none is no folder here and not in the hub's cache")
        assert "hf download org/none" in error


def test_a_plan_fetches_a_config_and_no_weight_and_no_data(
    hub: Path, tiny_model: Path, tmp_path: Path, run_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(hub, "org/tiny", "model", {"config.json": (tiny_model / "config.json").read_bytes()})
    for words in (("org/tiny", "max_length=64"), (run_config, "model=org/tiny", "dataset=org/nowhere")):
        assert megatrain("plan", *words) == 0
        assert "LlamaForCausalLM" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("cache/megatrain/hub/*/*/*")] == ["config.json"]
    put(hub, "org/empty", "model", {"model.safetensors": b"w"})
    assert megatrain("plan", "org/empty") == 2
    assert "model org/empty on the hub has no config.json" in capsys.readouterr().err
    assert megatrain("plan", "conf/my.yaml") == 2
    assert "config file conf/my.yaml cannot be read" in capsys.readouterr().err

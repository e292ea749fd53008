"""`megatrain config …` and `megatrain init` as a person uses them. No torch is loaded for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.cli.main import main
from megatrain.config import read_config

AXOLOTL = Path(__file__).parents[1] / "importers/files/axolotl.yaml"


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_aliases_are_shown_resolved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "base_model: m\ndataset: d\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 8\ncutoff_len: 64\n"
    )
    assert megatrain("config", "show", path, "lr=2e-5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model: m # written as base_model" in lines
    assert "train_batch_size: 32 # written as per_device_train_batch_size × gradient_accumulation_steps" in lines
    assert "max_length: 64 # written as cutoff_len" in lines
    assert "learning_rate: 2.0e-05 # written as lr" in lines
    assert "seed: 42 # default" in lines
    path.write_text("\n".join(lines))
    assert read_config(path).train_batch_size == 32


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("config", "schema") == 0
    assert "learning_rate" in json.loads(capsys.readouterr().out)["properties"]


def test_import_prints_or_writes_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert megatrain("config", "import", AXOLOTL) == 0
    text = capsys.readouterr().out
    assert "# Not carried over:" in text
    target = tmp_path / "ours.yaml"
    assert megatrain("config", "import", AXOLOTL, "--from", "axolotl", "-o", target) == 0
    assert target.read_text("utf-8") == text
    assert "not carried over: val_set_size: 0.02: name held-out rows" in capsys.readouterr().out
    assert megatrain("config", "import", AXOLOTL, "-o", target) == 2
    assert "is already there and is not overwritten" in capsys.readouterr().err
    assert megatrain("config", "import", AXOLOTL, "-o", tmp_path / "no/folder.yaml") == 2
    assert "no is no folder; make it first" in capsys.readouterr().err


def test_init_writes_a_config_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "first.yaml"
    words = ("init", path, "--model", "/m", "--dataset", "a.jsonl", "--eval-dataset", "b.jsonl")
    assert megatrain(*words) == 0
    config = read_config(path)
    assert (config.model, config.dataset, config.eval_dataset, config.eval_steps) == ("/m", "a.jsonl", "b.jsonl", 100)
    assert f"megatrain plan {path}" in capsys.readouterr().out
    path.write_text("mine")
    assert megatrain(*words) == 2
    assert "is already there and is not overwritten; name another file" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_these_verbs_need_no_torch() -> None:
    code = (
        "import sys\nsys.argv = ['megatrain', 'config', 'schema']\nfrom megatrain.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0

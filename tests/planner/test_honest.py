"""The plan keeps its word: a run takes no more memory than was planned, and not much less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.conftest import write_rows

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """75M parameters: large enough that the program itself is not the whole figure."""
    folder = tmp_path_factory.mktemp("model") / "mid"
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("activations=recompute", "micro_batch_tokens=1024", "loss_chunk_tokens=128"),
        ("activations=recompute", "micro_batch_tokens=512", "loss_chunk_tokens=512"),
        ("activations=keep", "micro_batch_tokens=512", "loss_chunk_tokens=128"),
    ],
)
def test_peak_ram_is_the_planned_one(model: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    write_rows(tmp_path / "train.jsonl", 400)
    base = {
        "model": model,
        "dataset": tmp_path / "train.jsonl",
        "output_dir": tmp_path / "run",
        "max_length": 512,
        "train_batch_size": 2,
        "max_steps": 2,
        "device": "cpu",
        "save_strategy": "no",
    }
    (tmp_path / "run.yaml").write_text("".join(f"{key}: {value}\n" for key, value in base.items()))
    code = "from megatrain.cli.main import main; main()"
    subprocess.run([sys.executable, "-c", code, "train", str(tmp_path / "run.yaml"), *words], check=True)
    planned = json.loads((tmp_path / "run/plan.json").read_text())["totals"]["ram"]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    peak = max(row["peak_ram_bytes"] for row in rows)
    assert peak <= planned, f"{peak / MIB:.0f} MiB taken, {planned / MIB:.0f} planned"
    assert planned <= peak * 1.25, f"{planned / MIB:.0f} MiB planned, {peak / MIB:.0f} taken"

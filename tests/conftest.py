"""What tests of whole runs share: a tiny model with a real tokenizer, and rows to train on. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

# Before torch is there, and for the processes that tests start. Matrices of tests are tiny: a team of threads that wait
# for each other is slower (1,200 chaos seeds 770 s, with two threads 2,196), by far where others use the cores, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "to",
    "a",
    "log",
    "while",
    "rain",
    "fell",
    "all",
    "day",
    "long",
    "over",
    "hill",
    "and",
    "far",
    "away",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_rows(path: Path, num_rows: int, first: int = 0) -> Path:
    """Chat rows of a few words each, all different."""
    rows = []
    for i in range(first, first + num_rows):
        words = [WORDS[(i * 7 + k * (i % 5 + 1)) % len(WORDS)] for k in range(6 + i % 9)]
        question, answer = " ".join(words[:4]), " ".join(words[4:])
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": f"{answer} {i}"}]
        rows.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(rows) + "\n", "utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-block Llama of random weights as a Hugging Face folder, with a byte-level tokenizer trained on `WORDS`."""
    import torch  # noqa: PLC0415 - tests that need no model must start without torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_run_config(folder: Path, model: Path, rest: str) -> Path:
    """`folder`/run.yaml of a run in `folder`/run, saved every 2 steps, with its rows beside it; `rest`: more lines."""
    write_rows(folder / "train.jsonl", 40)
    write_rows(folder / "eval.jsonl", 5, first=40)
    path = folder / "run.yaml"
    path.write_text(
        f"model: {model}\ndataset: {folder}/train.jsonl\neval_dataset: {folder}/eval.jsonl\n"
        f"output_dir: {folder}/run\nmax_length: 64\nmicro_batch_tokens: 64\nlearning_rate: 1e-2\nsave_steps: 2\n"
        f"device: cpu\n{rest}",
        "utf-8",
    )
    return path


@pytest.fixture
def run_config(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config file of a run of 6 steps in `tmp_path`, saved every 2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_run_config(tmp_path, tiny_model, "train_batch_size: 3\nmax_steps: 6\neval_steps: 3\n")

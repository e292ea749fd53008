"""Text on a GPU: blocks that stream through two slots give the words of blocks that stay, and of transformers."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatrain.cli import chat, opened
from megatrain.cli.opened import sources_of
from megatrain.cli.pointed import config_of
from megatrain.models.generate import Sampling
from megatrain.planner import Question
from megatrain.schedule.plan import Plan

pytestmark = pytest.mark.gpu
PROMPT = "the cat sat on a mat"
NUM_TOKENS = 48


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """Ten blocks wide enough that a copy takes time: a slot overwritten too early would show."""
    target = tmp_path / "model"
    shutil.copytree(tiny_model, target)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=1024, intermediate_size=4096, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    return target


def said(folder: Path, monkeypatch: pytest.MonkeyPatch, *, num_resident: int) -> tuple[list[int], int, str]:
    """(tokens, bytes that travel for one, the line about speed) with only the first blocks at home in HBM."""
    search = opened.search

    def streaming(question: Question) -> Plan:
        plan = search(question)
        streamed = {"state": "ram", "weights": "pool", "grads": "pool"}
        segments = [
            replace(s, **streamed) if s.kind == "block" and int(s.name[1:]) >= num_resident else s
            for s in plan.segments
        ]
        return replace(plan, segments=tuple(segments), weight_slots=2)

    with monkeypatch.context() as patched:
        patched.setattr(opened, "search", streaming)
        (source,) = sources_of(folder, [])
        talker = chat.talker_of(config_of(folder, ["device=cuda"]), source, raw=True)
    writer = talker.answer([{"role": "user", "content": PROMPT}], Sampling(NUM_TOKENS), io.StringIO())
    result = writer.ids, talker.lender.streamed_bytes, talker.speed(writer, writer.first_s - 1.0)
    talker.close()
    return result


def test_streamed_words_are_resident_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resident, no_bytes, line = said(folder, monkeypatch, num_resident=10)
    assert no_bytes == 0
    assert "link bound" not in line
    for num_resident in (0, 3, 7):
        streamed, num_bytes, line = said(folder, monkeypatch, num_resident=num_resident)
        assert num_bytes > (10 - num_resident) * 20e6
        assert "link bound" in line
        assert streamed == resident
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    prompt = torch.tensor([AutoTokenizer.from_pretrained(folder).encode(PROMPT)], device="cuda")
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS)
    assert out[0, prompt.shape[1] :].tolist() == resident
    assert len(set(resident)) > 3
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"

"""Published chat templates: the text they make and which of it is trained, written down by hand.

Each file of `golden/` holds a template in the published format of a model family, and conversations as pieces of
[text, trained?]. The pieces are the truth: they were derived from the format, not from our output. Trained is what the
model writes itself: everything behind the generation prompt up to and with the token that ends the turn.
"""
from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatrain.data import sandbox
from megatrain.data.encode import Encoded, Encoder
from megatrain.data.formats import BadSample, Chat, to_sample
from megatrain.data.sandbox import Sandbox, source_of
from megatrain.data.texts import Texts

FILES = sorted((Path(__file__).parent / "golden").glob("*.json"))


@cache
def golden(name: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text("utf-8"))


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A token a byte, and the model's own special tokens."""
    file = golden(name)
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(file["special"])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=file["bos"], eos_token=file["eos"],
                                   chat_template="".join(file["template"]))


CASES = [pytest.param(path.stem, i, id=f"{path.stem}: {case['name']}")
         for path in FILES for i, case in enumerate(golden(path.stem)["cases"])]


def table(name: str, index: int) -> tuple[list[int], list[bool]]:
    """The golden tokens and flags: every piece on its own, since a token a byte never crosses a border."""
    ids: list[int] = []
    trained: list[bool] = []
    for text, flag in golden(name)["cases"][index]["pieces"]:
        piece = tokenizer_of(name).backend_tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        trained += [flag] * len(piece)
    return ids, trained


def made(name: str, index: int, **rest: Any) -> Encoded:
    case = golden(name)["cases"][index]
    sample = to_sample({"messages": case["messages"], "tools": case.get("tools")}, "messages")
    texts = Texts(source_of(tokenizer_of(name)), assistant_only_loss=True)
    encoder = Encoder(tokenizer_of(name), assistant_only_loss=True,
                      **{"max_length": 4096, "truncation": "keep_start", **rest})
    [result] = encoder.encode([texts.of(sample)])
    if isinstance(result, BadSample):
        raise result
    return result


def test_there_are_enough() -> None:
    assert len(FILES) >= 10
    assert any("tools" in golden(path.stem)["cases"][0] for path in FILES)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_tokens_and_labels(name: str, index: int) -> None:
    ids, trained = table(name, index)
    result = made(name, index)
    assert result.ids.tolist() == ids
    assert result.trained.tolist() == trained
    assert not result.truncated


@pytest.mark.parametrize(("name", "index"), CASES)
def test_transformers_writes_the_same_text(name: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our sandbox stands in for transformers' own: what is trained here is what the model will be asked there."""
    case = golden(name)["cases"][index]
    chat = to_sample({"messages": case["messages"], "tools": case.get("tools")}, "messages")
    assert isinstance(chat, Chat)
    tokenizer = tokenizer_of(name)
    text = "".join(piece for piece, _ in case["pieces"])
    source = source_of(tokenizer)
    assert source is not None
    for prompt in (False, True):
        if "date" in golden(name):      # theirs is today's
            monkeypatch.setattr(sandbox, "PINNED_DATE", sandbox.datetime.now())
            text = text.replace("2025-01-01", f"{sandbox.PINNED_DATE:%Y-%m-%d}").replace(
                "01 Jan 2025", f"{sandbox.PINNED_DATE:%d %b %Y}")
        theirs = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False,
                                               add_generation_prompt=prompt)
        ours = Sandbox(source.with_tools, source.special).render(chat.messages, chat.tools, prompt).text
        assert ours == theirs
        assert prompt or ours == text


@pytest.mark.parametrize(("name", "index"), CASES)
def test_truncation_from_either_side(name: str, index: int) -> None:
    ids, trained = table(name, index)
    first = trained.index(True)
    for length in (first + 1, first + 3, len(ids) - 1):
        start = made(name, index, max_length=length)
        assert (start.ids.tolist(), start.trained.tolist()) == (ids[:length], trained[:length])
        end = made(name, index, max_length=length, truncation="keep_end")
        assert (end.ids.tolist(), end.trained.tolist()) == (ids[-length:], trained[-length:])
    assert made(name, index, max_length=len(ids) - 1).truncated
    assert not made(name, index, max_length=len(ids)).truncated
    with pytest.raises(BadSample, match="all trained tokens lie beyond max_length"):
        made(name, index, max_length=first)


@pytest.mark.parametrize(("name", "index"), CASES)
def test_every_assistant_turn_ends_with_a_trained_special_token(name: str, index: int) -> None:
    """Or the model never stops. And BOS is never doubled."""
    result = made(name, index)
    special = set(tokenizer_of(name).all_special_ids) | set(tokenizer_of(name).get_added_vocab().values())
    ends = [i for i in range(len(result.ids)) if result.trained[i]
            and (i + 1 == len(result.ids) or not result.trained[i + 1])]
    turns = [m for m in golden(name)["cases"][index]["messages"] if m["role"] == "assistant"]
    assert len(ends) == len(turns)
    assert all(int(result.ids[i]) in special for i in ends)
    bos = tokenizer_of(name).bos_token_id
    assert bos is None or result.ids[:2].tolist() != [bos, bos]


@pytest.mark.parametrize("name", [path.stem for path in FILES if "refused" in golden(path.stem)])
def test_what_a_template_refuses_is_reported(name: str) -> None:
    texts = Texts(source_of(tokenizer_of(name)), assistant_only_loss=True)
    for case in golden(name)["refused"]:
        with pytest.raises(BadSample, match=case["reason"]):
            texts.of(to_sample({"messages": case["messages"]}, "messages"))

"""Texts are tokenised and masked many at once: each comes out as it does alone."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors

from megatrain.data.encode import Encoded, Encoder, TokenBytes, dividers, without_post_processor
from megatrain.data.texts import Text
from tests.data.tiny_tokenizers import make_byte_tokenizer, make_word_tokenizer

TEXTS = [
    Text("chat", "hi yes", [3, 6]), Text("chat", "né 日本 \U0001f600!", [1, 2, 6, 8]),
    Text("chat", "a" * 300, [7, 290]), Text("chat", "b" * 20 + "é" * 300, [2, 4, 9, 310]),
    Text("completion", "why so", [4, 6]), Text("chat", "no", [0, 2]),
]


def encoded(encoder: Encoder, texts: list[Text]) -> list[tuple[list[int], list[bool], bool]]:
    results = encoder.encode(texts)
    assert all(isinstance(result, Encoded) for result in results)
    return [(r.ids.tolist(), r.trained.tolist(), r.truncated) for r in results if isinstance(r, Encoded)]


def test_many_at_once_are_as_each_alone() -> None:
    """Of long ones only the start is tokenised, so trained runs lie behind its end; one is not spelt by its tokens."""
    for texts in (TEXTS, [*TEXTS, Text("chat", "HI yes", [0, 2])]):
        tokenizer = make_byte_tokenizer()
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("H", "h")
        encoder = Encoder(tokenizer, max_length=10, truncation="keep_start", assistant_only_loss=True)
        together = encoded(encoder, texts)
        assert together == [one for text in texts for one in encoded(encoder, [text])]
        assert together[0][1] == [False] * 3 + [True] * 3
        assert [truncated for _, _, truncated in together[2:4]] == [True, True]
    assert together[-1][1] == [True] * 2 + [False] * 4


def test_tokens_must_spell_each_text_and_not_only_all_of_them() -> None:
    backend = make_byte_tokenizer().backend_tokenizer
    ids = np.array(backend.encode("abc", add_special_tokens=False).ids)
    token_bytes = TokenBytes(backend)
    bounds = token_bytes.bounds(["ab", "c"], ids, np.array([2, 3]))
    assert bounds is not None
    assert [bound.tolist() for bound in bounds] == [[0, 1, 2], [1, 2, 3]]
    assert token_bytes.bounds(["a", "bc"], ids, np.array([2, 3])) is None
    assert token_bytes.bounds(["ab", "d"], ids, np.array([2, 3])) is None


def texts_given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by every text that the library is given from here on; offsets are not asked for."""
    calls: list[str] = []
    whole = Tokenizer.encode_batch_fast
    monkeypatch.setattr("megatrain.data.encode.Tokenizer.encode_batch_fast",
                        lambda self, given, **how: (calls.extend(given), whole(self, given, **how))[1])
    monkeypatch.setattr("megatrain.data.encode._by_offsets", None)      # the ids spell the texts as they are
    return calls


SYSTEM = "<|im_start|>system\nso<|im_end|>"
ALIKE = [SYSTEM + rest
         for rest in ("\n<|im_start|>user\nhi<|im_end|>", "", " <s>  hi", "<|im_end|>", "né\u0301", "<|im_e")]


def test_what_texts_begin_with_alike_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<wide>", lstrip=True, rstrip=True)])
    encoder = Encoder(tokenizer, max_length=99, truncation="keep_start", assistant_only_loss=True)
    texts = [Text("chat", text, [3, len(text)]) for text in [*ALIKE, "no end"]]
    calls = texts_given(monkeypatch)
    together = encoded(encoder, texts)
    assert calls.count(SYSTEM) == 1
    assert sum(map(len, calls)) == sum(len(text.text) for text in texts) - (len(ALIKE) - 1) * len(SYSTEM)
    monkeypatch.undo()
    wide = [Text("chat", text + " <wide> \nhi", [3, 15]) for text in [*ALIKE, "no end"]]
    backend = tokenizer.backend_tokenizer
    for (ids, trained, _), text in zip([*together, *encoded(encoder, wide)], [*texts, *wide], strict=True):
        assert ids == backend.encode(text.text, add_special_tokens=False).ids
        assert trained == [end > 3 and start < text.edges[1]
                           for start, end in backend.encode(text.text, add_special_tokens=False).offsets]


TURNS = ["\n<|im_start|>".join(f"{spoken} <|im_end|>" for spoken in row) for row in (
    ["hi", "yes", "no"], ["hi", " ", "né\u0301"], ["<|im_end|>", "\n<|im_start|>", ""], ["<|im_sta", "rt|>", "x" * 9])]


@pytest.mark.parametrize(("spelt", "stand_in"), [("", "<s>"), ("<s>", "<extra>"), ("<s><extra>", None)])
def test_what_stands_between_turns_is_tokenised_as_one_token_that_no_text_has(
        monkeypatch: pytest.MonkeyPatch, spelt: str, stand_in: str | None) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens(["<extra>"])
    encoder = Encoder(tokenizer, max_length=99, truncation="keep_start", assistant_only_loss=True)
    texts = [Text("chat", text, [3, 15]) for text in [*TURNS, "a word" + spelt, "a<|im_start|>\n<|im_end|>b"]]
    calls = texts_given(monkeypatch)
    results = encoded(encoder, texts)
    sent = "".join(calls)
    assert sent.count("<|im_end|>\n<|im_start|>") == (0 if stand_in else 8)
    assert stand_in is None or sent.count(stand_in) == 8
    for (ids, trained, _), text in zip(results, texts, strict=True):
        alone = tokenizer.backend_tokenizer.encode(text.text, add_special_tokens=False)
        assert ids == alone.ids
        assert trained == [end > 3 and start < 15 for start, end in alone.offsets]


def test_texts_are_divided_only_where_nothing_reaches_over() -> None:
    def found(*others: AddedToken, **how: bool) -> bool:
        backend = without_post_processor(make_byte_tokenizer().backend_tokenizer)
        backend.add_special_tokens([AddedToken("<end>", **{"normalized": False, **how}), *others])
        return dividers(backend).get("<end>") == backend.token_to_id("<end>")
    assert found()
    assert found(AddedToken("<other>", lstrip=True, rstrip=True))
    assert not any(found(AddedToken(other)) for other in ("<end>\n", "a<end>", "a<", "<<e"))
    assert found(AddedToken(">a"))
    assert not found(AddedToken("hi", single_word=True))
    assert not any(found(**{how: True}) for how in ("lstrip", "rstrip", "single_word", "normalized"))
    backend = without_post_processor(make_byte_tokenizer().backend_tokenizer)
    assert set(dividers(backend)) == {"<|im_start|>", "<|im_end|>", "<s>"}
    backend.encode_special_tokens = True
    assert dividers(backend) == {}
    backend.encode_special_tokens = False
    backend.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    assert dividers(backend) == {}


BOS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
HOSTILE = ["", " ", "hi yes  no", "HI <|im_end|> yes", "a<tool>  b <TOOL>", "<word>x <word> x", " <odd>\n", "<s><s>hi",
           "ne\u0301 日本 \U0001f600\r\n\t", "<|im_start|>user\nhi<|im_end|>\n" * 9, "x" * 500]


@pytest.mark.parametrize("make", [make_byte_tokenizer, make_word_tokenizer])
@pytest.mark.parametrize("behind", [None, processors.ByteLevel(trim_offsets=True), BOS,
                                    processors.Sequence([processors.ByteLevel(trim_offsets=False), BOS])])
@pytest.mark.parametrize("normalizer", [None, normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])])
@pytest.mark.parametrize("splits", [True, False])
def test_without_what_stands_behind_the_model_the_ids_are_the_same(make: Any, behind: Any, normalizer: Any,
                                                                   splits: bool) -> None:
    backend: Tokenizer = make().backend_tokenizer
    backend.post_processor = behind
    backend.normalizer = normalizer
    backend.encode_special_tokens = not splits
    if not splits:
        backend.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    backend.add_tokens([AddedToken("<tool>", normalized=True), AddedToken("<word>", single_word=True, rstrip=True)])
    backend.add_special_tokens([AddedToken("<odd>", lstrip=True, rstrip=True, special=True)])
    bare = without_post_processor(backend)
    assert bare is not backend
    assert bare.post_processor is None
    assert (backend.post_processor is None) == (behind is None)     # the tokenizer itself stays as it is
    for found, expected in zip(bare.encode_batch_fast(HOSTILE, add_special_tokens=False),
                               backend.encode_batch(HOSTILE, add_special_tokens=False), strict=True):
        assert found.ids == expected.ids


def test_a_tokenizer_whose_ids_are_made_behind_its_model_is_used_as_it_is() -> None:
    tokenizer = make_byte_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="$A $A", special_tokens=[])
    assert without_post_processor(backend) is backend
    encoder = Encoder(tokenizer, max_length=99, truncation="keep_start", assistant_only_loss=True)
    [(ids, _, _)] = encoded(encoder, [Text("chat", "ab", [0, 2])])
    assert len(ids) == 4

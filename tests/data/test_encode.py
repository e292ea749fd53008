"""Texts are tokenised and masked many at once: each comes out as it does alone."""
from __future__ import annotations

import numpy as np
from tokenizers import normalizers

from megatrain.data.encode import Encoded, Encoder, TokenBytes
from megatrain.data.texts import Text
from tests.data.tiny_tokenizers import make_byte_tokenizer

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

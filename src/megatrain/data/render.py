"""Samples to token ids and trained flags. A mask is made by position; no token id ever decides what is trained,
save one: an end-of-turn token right behind a marked turn belongs to the turn."""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatrain.data.formats import BadSample, Chat, Completion, Document, Sample
from megatrain.data.options import Truncation
from megatrain.data.template import ChatTemplate, Span
from megatrain.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

PIECE_CHARS = 4 << 20               # a longer document is tokenised in pieces: offsets of 200 MB would take gigabytes
CHARS_PER_TOKEN_BOUND = 64          # a chat is cut to this many characters a token of max_length before tokenising
SETTLED_TOKENS = 16                 # …and tokens this near the cut are not believed
ALL_CUT = "all trained tokens lie beyond max_length"


class Encoded(NamedTuple):
    """One sample as tokens. `trained[t]` says whether token t is a target; the first token never is one in effect."""
    ids: list[int]
    trained: np.ndarray     # bool
    truncated: bool


class Renderer:
    """Turns samples into tokens, many at a time (the tokenizer works on all cores within a call)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, truncation: Truncation,
                 assistant_only_loss: bool) -> None:
        if not tokenizer.is_fast:
            raise DataError(f"tokenizer {type(tokenizer).__name__} has no fast (tokenizers library) form; convert it "
                            "to a tokenizer.json")
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()       # a tokenizer.json may carry both switched on
        self._backend.no_padding()
        self._max_length = max_length
        self._truncation = truncation
        self._assistant_only_loss = assistant_only_loss
        self._bos_id: int | None = tokenizer.bos_token_id
        self._eos_id: int | None = tokenizer.eos_token_id
        self._adds_bos = self._bos_id is not None and self._backend.encode("a").ids[:1] == [self._bos_id]
        self._template: ChatTemplate | None = None

    def warnings(self) -> tuple[str, ...]:
        """What a user should know of the tokenizer in use, as sentences."""
        if self._template is None:
            if self._eos_id is None:
                return ("the tokenizer has no end-of-sequence token: the model will not learn to stop",)
        elif not self._template.ends:
            return ("the chat template closes assistant turns with no special token: the model will not learn to stop",)
        return ()

    def encode(self, samples: Sequence[Sample]) -> list[Encoded | BadSample]:
        """One result a sample, in order."""
        results: list[Encoded | BadSample | None] = [None] * len(samples)
        texts: list[str] = []
        waiting: list[tuple[int, list[Span]]] = []      # samples whose text is in `texts`, with its trained spans
        for i, sample in enumerate(samples):
            try:
                if isinstance(sample, Document):
                    results[i] = self._document(sample)
                    continue
                if isinstance(sample, Chat):
                    sample = self._chat_template().fitted(sample)
                    if self._assistant_only_loss and self._chat_template().marked(sample):
                        results[i] = self._cut(*self._marked_chat(sample))
                        continue
                text, spans = self._text_and_spans(sample)
                texts.append(text)
                waiting.append((i, spans))
            except BadSample as bad:
                results[i] = bad
        for (i, spans), encoding in zip(waiting, self._encode_texts(texts), strict=True):
            try:
                results[i] = self._spanned(samples[i], spans, encoding)
            except BadSample as bad:
                results[i] = bad
        return results      # type: ignore[return-value]  # every index was filled

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer)
        return self._template

    def _document(self, sample: Document) -> Encoded:
        ids: list[int] = []
        for encoding in self._backend.encode_batch_fast(_split(sample.text), add_special_tokens=False):
            ids += encoding.ids
        ids = self._with_ends(ids)
        if len(ids) < 2:
            raise BadSample("fewer than two tokens: nothing to predict")
        return Encoded(ids, np.ones(len(ids), bool), False)

    def _with_ends(self, ids: list[int]) -> list[int]:
        """BOS in front where the tokenizer itself would put one, EOS behind; neither doubled."""
        if self._adds_bos and ids[:1] != [self._bos_id]:
            ids = [self._bos_id, *ids]
        if self._eos_id is not None and ids[-1:] != [self._eos_id]:
            ids = [*ids, self._eos_id]
        return ids

    def _marked_chat(self, chat: Chat) -> tuple[list[int], np.ndarray]:
        template = self._chat_template()
        ids, flags = template.encode_marked(chat)
        trained = np.asarray(flags, bool)
        for behind in (np.flatnonzero(trained[:-1] & ~trained[1:]) + 1).tolist():
            while behind < len(ids) and ids[behind] in template.end_ids:
                trained[behind] = True
                behind += 1
        if chat.first_trained:
            prompt = template.render(chat.messages[:chat.first_trained], chat.tools, prompt=True)
            trained[:len(self._backend.encode(prompt, add_special_tokens=False).ids)] = False
        if any(m.get("weight", 1) == 0 for m in chat.messages):
            trained = _unweighted(chat, trained)
        return self._single_bos(ids, trained)

    def _text_and_spans(self, sample: Chat | Completion) -> tuple[str, list[Span]]:
        if isinstance(sample, Completion):
            text = sample.prompt + sample.completion
            return text, [Span(len(sample.prompt) if self._assistant_only_loss else 0, len(text))]
        template = self._chat_template()
        text = template.render(sample.messages, sample.tools)
        spans = template.spans(sample, text) if self._assistant_only_loss else [Span(0, len(text))]
        return text, spans

    def _encode_texts(self, texts: list[str]) -> list[Encoding]:
        limit = self._max_length * CHARS_PER_TOKEN_BOUND
        if self._truncation != "keep_start" or all(len(text) <= limit for text in texts):
            return self._backend.encode_batch(texts, add_special_tokens=False)
        encodings = self._backend.encode_batch([text[:limit] for text in texts], add_special_tokens=False)
        for i, text in enumerate(texts):
            if len(text) > limit and len(encodings[i].ids) < self._max_length + SETTLED_TOKENS:
                encodings[i] = self._backend.encode(text, add_special_tokens=False)
        return encodings

    def _spanned(self, sample: Sample, spans: list[Span], encoding: Encoding) -> Encoded:
        ids = encoding.ids
        trained = _mask(encoding.offsets, spans)
        if isinstance(sample, Completion):
            whole = self._with_ends(ids)
            front = int(whole[:1] != ids[:1])
            behind = len(whole) - len(ids) - front
            untrained = not self._assistant_only_loss
            trained = np.concatenate([np.full(front, untrained), trained, np.ones(behind, bool)])
            ids = whole
        else:
            ids, trained = self._single_bos(ids, trained)
        return self._cut(ids, trained)

    def _single_bos(self, ids: list[int], trained: np.ndarray) -> tuple[list[int], np.ndarray]:
        if self._bos_id is not None and ids[:2] == [self._bos_id] * 2:
            return ids[1:], trained[1:]
        return ids, trained

    def _cut(self, ids: list[int], trained: np.ndarray) -> Encoded:
        if not trained[1:].any():
            raise BadSample("no token of it is trained")
        truncated = len(ids) > self._max_length
        if truncated:
            if self._truncation == "drop":
                raise BadSample("longer than max_length")
            kept = slice(0, self._max_length) if self._truncation == "keep_start" else slice(-self._max_length, None)
            ids, trained = ids[kept], trained[kept]
            if not trained[1:].any():
                raise BadSample(ALL_CUT)
        return Encoded(ids, trained, truncated)


def _mask(offsets: list[tuple[int, int]], spans: list[Span]) -> np.ndarray:
    """True where a token's characters overlap a span. Offsets and spans are both in order."""
    trained = np.zeros(len(offsets), bool)
    for start, end in spans:
        first = bisect_right(offsets, start, key=lambda o: o[1])
        trained[first:bisect_left(offsets, end, key=lambda o: o[0])] = True
    return trained


def _unweighted(chat: Chat, trained: np.ndarray) -> np.ndarray:
    """The mask without the turns of weight 0; runs of trained tokens are matched with the assistant turns."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]]).astype(np.int8)))
    weights = [m.get("weight", 1) for m in chat.messages if m["role"] == "assistant"]
    if len(edges) != 2 * len(weights):
        raise BadSample("message weights cannot be matched with the template's marked turns")
    trained = trained.copy()
    for weight, start, end in zip(weights, edges[::2], edges[1::2], strict=True):
        if weight == 0:
            trained[start:end] = False
    return trained


def _split(text: str) -> list[str]:
    """The text in pieces of at most about PIECE_CHARS, cut before a line break, else before a blank, else anywhere."""
    pieces, at = [], 0
    while len(text) - at > PIECE_CHARS:
        end = at + PIECE_CHARS
        cut = text.rfind("\n", at + 1, end)
        cut = cut if cut > at else text.rfind(" ", at + 1, end)
        end = cut if cut > at else end
        pieces.append(text[at:end])
        at = end
    pieces.append(text[at:])
    return pieces

"""Samples to token ids and trained flags. A mask is made by position; no token id ever decides what is trained,
save one: an end-of-turn token right behind a marked turn belongs to the turn."""
from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatrain.data.formats import BadSample, Chat, Completion, Document, Sample
from megatrain.data.options import Truncation
from megatrain.data.template import ASSISTANT, ChatTemplate, Span
from megatrain.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

PIECE_CHARS = 1 << 20               # a longer document is tokenised in pieces…
CALL_CHARS = 4 << 20                # …and no more than this at once: 200 MB as the library's tokens are gigabytes
CHARS_PER_TOKEN_BOUND = 16          # a chat is cut to this many characters a token of max_length before tokenising
SETTLED_TOKENS = 16                 # …and tokens this near the cut are not believed


class Encoded(NamedTuple):
    """One sample as tokens. `trained[t]` says whether token t is a target; the first token never is one in effect."""
    ids: np.ndarray         # uint32
    trained: np.ndarray     # bool
    truncated: bool


class Renderer:
    """Turns samples into tokens, many at a time (the tokenizer works on all cores within a call)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, truncation: Truncation,
                 assistant_only_loss: bool, train_roles: Sequence[str] = (ASSISTANT,)) -> None:
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
        self._roles = frozenset(train_roles)
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
        documents: list[int] = []
        texts: list[str] = []
        waiting: list[tuple[int, list[Span]]] = []      # samples whose text is in `texts`, with its trained spans
        for i, sample in enumerate(samples):
            try:
                if isinstance(sample, Document):
                    documents.append(i)
                    continue
                if isinstance(sample, Chat):
                    sample = self._chat_template().fitted(sample)
                    if self._goes_by_marks(sample):
                        results[i] = self._cut(*self._marked_chat(sample))
                        continue
                text, spans = self._text_and_spans(sample)
                texts.append(text)
                waiting.append((i, spans))
            except BadSample as bad:
                results[i] = bad
        for i, ids in self._document_ids({i: samples[i].text for i in documents}):
            results[i] = (Encoded(ids, np.ones(len(ids), bool), False) if len(ids) > 1 else
                          BadSample("fewer than two tokens: nothing to predict"))
        for (i, spans), encoding in zip(waiting, self._encode_texts(texts), strict=True):
            try:
                results[i] = self._spanned(samples[i], spans, encoding)
            except BadSample as bad:
                results[i] = bad
        return results      # type: ignore[return-value]  # every index was filled

    def _goes_by_marks(self, chat: Chat) -> bool:
        """`{% generation %}` marks stand around the assistant's turns alone."""
        return self._assistant_only_loss and self._roles == {ASSISTANT} and self._chat_template().marked(chat)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate(self._tokenizer)
        return self._template

    def _document_ids(self, texts: Mapping[int, str]) -> Iterator[tuple[int, np.ndarray]]:
        parts: dict[int, list[np.ndarray]] = {i: [] for i in texts}
        for group in _groups([(i, piece) for i, text in texts.items() for piece in _split(text)]):
            encodings = self._backend.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
            for (i, _), encoding in zip(group, encodings, strict=True):
                parts[i].append(np.array(encoding.ids, np.uint32))
        for i, found in parts.items():
            ids = np.concatenate(found)
            front, behind = self._ends(ids)
            yield i, np.concatenate([front, ids, behind])

    def _ends(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What to put around the tokens of plain text: BOS where the tokenizer itself would, and EOS; none doubled."""
        bos = self._adds_bos and (len(ids) == 0 or ids[0] != self._bos_id)
        eos = self._eos_id is not None and (len(ids) == 0 or ids[-1] != self._eos_id)
        return (np.array([self._bos_id] if bos else [], np.uint32), np.array([self._eos_id] if eos else [], np.uint32))

    def _marked_chat(self, chat: Chat) -> tuple[np.ndarray, np.ndarray]:
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
        return self._single_bos(np.array(ids, np.uint32), trained)

    def _text_and_spans(self, sample: Chat | Completion) -> tuple[str, list[Span]]:
        if isinstance(sample, Completion):
            text = sample.prompt + sample.completion
            return text, [Span(len(sample.prompt) if self._assistant_only_loss else 0, len(text))]
        template = self._chat_template()
        text = template.render(sample.messages, sample.tools)
        spans = template.spans(sample, text, self._roles) if self._assistant_only_loss else [Span(0, len(text))]
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
        ids = np.array(encoding.ids, np.uint32)
        trained = _mask(encoding.offsets, spans)
        if isinstance(sample, Completion):
            front, behind = self._ends(ids)
            ids = np.concatenate([front, ids, behind])
            trained = np.concatenate([np.full(len(front), not self._assistant_only_loss), trained,
                                      np.ones(len(behind), bool)])
        else:
            ids, trained = self._single_bos(ids, trained)
        return self._cut(ids, trained)

    def _single_bos(self, ids: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._bos_id is not None and ids[:2].tolist() == [self._bos_id] * 2:
            return ids[1:], trained[1:]
        return ids, trained

    def _cut(self, ids: np.ndarray, trained: np.ndarray) -> Encoded:
        truncated = len(ids) > self._max_length
        if truncated:
            if self._truncation == "drop":
                raise BadSample("longer than max_length")
            kept = slice(0, self._max_length) if self._truncation == "keep_start" else slice(-self._max_length, None)
            ids, trained = ids[kept], trained[kept]
        if not trained[1:].any():
            raise BadSample("all trained tokens lie beyond max_length" if truncated else "no token of it is trained")
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
    """The text in pieces of at most PIECE_CHARS, cut behind a line break that no blank follows, else anywhere."""
    pieces, at = [], 0
    while len(text) - at > PIECE_CHARS:
        end = at + PIECE_CHARS
        cut = text.rfind("\n", at, end - 1)
        while cut >= 0 and text[cut + 1].isspace():
            cut = text.rfind("\n", at, cut)
        end = cut + 1 if cut >= 0 else end
        pieces.append(text[at:end])
        at = end
    pieces.append(text[at:])
    return pieces


def _groups(pieces: Sequence[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Runs of pieces of at most about CALL_CHARS, so that one call never holds much more than that as tokens."""
    group: list[tuple[int, str]] = []
    num_chars = 0
    for piece in pieces:
        group.append(piece)
        num_chars += len(piece[1])
        if num_chars >= CALL_CHARS:
            yield group
            group, num_chars = [], 0
    if group:
        yield group

"""Texts to token ids and trained flags. A mask is made by position; no token id ever decides what is trained."""
from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from megatrain.data.formats import BEYOND, LONGER, UNTRAINED, BadSample
from megatrain.data.options import Truncation
from megatrain.data.texts import Text
from megatrain.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

PIECE_CHARS = 1 << 20               # a longer document is tokenised in pieces…
CALL_CHARS = 4 << 20                # …and no more than this at once: 200 MB as the library's tokens are gigabytes
CHARS_PER_TOKEN_BOUNDS = (6, 24)    # a chat is cut to this many characters a token of max_length before tokenising…
SETTLED_TOKENS = 16                 # …and tokens this near the cut are not believed: the next bound, then the whole
JOINT_CHARS = 8                     # at most so much between the two tokens of a joint
PROBE = "Q7x\n\n été 日本 \U0001f600  A7x\t1234567"


class Encoded(NamedTuple):
    """One sample as tokens. `trained[t]` says whether token t is a target; the first token never is one in effect."""
    ids: np.ndarray         # uint32
    trained: np.ndarray     # bool
    truncated: bool


class Joint(NamedTuple):
    """What stands between two turns, from the end-of-sequence token to the special token that opens the next, and its
    ids. In a call to the library another special token, one that no text has, stands for all of it."""
    text: str
    ids: list[int]
    stand_in: str
    stand_in_id: int


class Encoder:
    """Turns texts into tokens, many at a time (the tokenizer works on all cores within a call)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, max_length: int, truncation: Truncation,
                 assistant_only_loss: bool) -> None:
        if not tokenizer.is_fast:
            raise DataError(f"tokenizer {type(tokenizer).__name__} has no fast (tokenizers library) form; convert it "
                            "to a tokenizer.json")
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._backend.no_truncation()       # a tokenizer.json may carry both switched on
        self._backend.no_padding()
        self._max_length = max_length
        self._truncation = truncation
        self._assistant_only_loss = assistant_only_loss
        self._bos_id: int | None = tokenizer.bos_token_id
        self._eos_id: int | None = tokenizer.eos_token_id
        self._adds_bos = self._bos_id is not None and self._backend.encode("a").ids[:1] == [self._bos_id]
        self._bare = without_post_processor(self._backend)
        self._dividers = dividers(self._bare)
        self._eos = next((token for token, token_id in self._dividers.items() if token_id == self._eos_id), None)
        self._joint = re.compile(f"{re.escape(self._eos or '')}.{{0,{JOINT_CHARS}}}?"
                                 f"({'|'.join(map(re.escape, self._dividers))})", re.DOTALL)
        self._token_bytes = TokenBytes(self._backend)
        probe = np.array(self._backend.encode(PROBE, add_special_tokens=False).ids, np.int64)
        self._is_byte_level = self._token_bytes.bounds([PROBE], probe, np.array([len(probe)])) is not None

    def encode(self, texts: Sequence[Text]) -> list[Encoded | BadSample]:
        """One result a text, in order."""
        results: list[Encoded | BadSample | None] = [None] * len(texts)
        whole = [i for i, text in enumerate(texts) if text.kind != "document"]
        for i, ids in self._document_ids({i: t.text for i, t in enumerate(texts) if t.kind == "document"}):
            results[i] = (Encoded(ids, np.ones(len(ids), bool), False) if len(ids) > 1 else
                          BadSample("fewer than two tokens: nothing to predict"))
        for i, (ids, trained) in zip(whole, self._masked([texts[i] for i in whole]), strict=True):
            try:
                results[i] = self._finished(texts[i].kind == "completion", ids, trained)
            except BadSample as bad:
                results[i] = bad
        return results      # type: ignore[return-value]  # every index was filled

    def _document_ids(self, texts: Mapping[int, str]) -> Iterator[tuple[int, np.ndarray]]:
        parts: dict[int, list[np.ndarray]] = {i: [] for i in texts}
        for group in _groups([(i, piece) for i, text in texts.items() for piece in _split(text)]):
            encodings = self._bare.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
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

    def _masked(self, texts: Sequence[Text]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and trained flags of each text, at least up to `max_length` if only the start is kept."""
        results: list[tuple[np.ndarray, np.ndarray] | None] = [None] * len(texts)
        waiting = list(range(len(texts)))
        bounds = [bound * self._max_length for bound in CHARS_PER_TOKEN_BOUNDS]
        for limit in [*bounds, None] if self._truncation == "keep_start" else [None]:
            cut = [texts[i].text if limit is None else texts[i].text[:limit] for i in waiting]
            for i, text, found in zip(waiting, cut, self._tokens(cut, [texts[i].edges for i in waiting]), strict=True):
                if len(text) == len(texts[i].text) or len(found[0]) >= self._max_length + SETTLED_TOKENS:
                    results[i] = found
            waiting = [i for i in waiting if results[i] is None]
        return results      # type: ignore[return-value]  # the last limit is none

    def _tokens(self, texts: list[str], edges: Sequence[list[int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        if not self._is_byte_level:
            for encoding, its_edges in zip(self._backend.encode_batch(texts, add_special_tokens=False), edges,
                                           strict=True):
                yield _by_offsets(encoding, its_edges)
            return
        # Without offsets the library needs a quarter less time, and where tokens are bytes their lengths say the same.
        yield from self._by_bytes(texts, *self._ids(texts), edges)

    def _ids(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts one behind another, and where each text's stop. What most texts begin with alike, up to
        their first end of a turn (a system prompt: a tenth of short chats), is tokenised once; what stands between
        their turns (another tenth) as one token."""
        heads = [""] * len(texts)
        if self._eos:
            heads = [head + end for head, end, _ in (text.partition(self._eos) for text in texts)]
        distinct = list(dict.fromkeys(heads))
        if 2 * len(distinct) > len(texts):
            heads, distinct = [""] * len(texts), [""]
        pieces = [*distinct, *(text[len(head):] for head, text in zip(heads, texts, strict=True))]
        joint = self._joint_in(pieces)
        if joint is not None:
            pieces = [piece.replace(joint.text, joint.stand_in) for piece in pieces]
        found = [one.ids for one in self._bare.encode_batch_fast(pieces, add_special_tokens=False)]
        ids_of = dict(zip(distinct, found, strict=False))
        flat, stops = array("I"), array("q")
        for head, ids in zip(heads, found[len(distinct):], strict=True):
            flat.fromlist(ids_of[head])     # a fifth of what numpy takes for a list
            flat.fromlist(ids)
            stops.append(len(flat))
        ids, stops = np.frombuffer(flat, np.uint32), np.frombuffer(stops, np.int64)
        return (ids, stops) if joint is None else _with_joints(ids, stops, joint)

    def _joint_in(self, pieces: list[str]) -> Joint | None:
        """The first joint of the pieces, if it and a stand-in are found."""
        found = next(filter(None, map(self._joint.search, pieces)), None) if self._eos else None
        if found is None:
            return None
        others = (token for token in self._dividers if token not in found[0])
        stand_in = next((token for token in others if not any(token in piece for piece in pieces)), None)
        if stand_in is None:
            return None
        ids = self._bare.encode(found[0], add_special_tokens=False).ids
        return Joint(found[0], ids, stand_in, self._dividers[stand_in])

    def _by_bytes(self, texts: list[str], ids: np.ndarray, stops: np.ndarray,
                  edges: Sequence[list[int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Ids and flags of all texts at once, by the bytes of their tokens; where those do not spell the texts, of each
        alone, and by the library's offsets for a text that they do not spell."""
        bounds = self._token_bytes.bounds(texts, ids, stops)
        runs = list(pairwise([0, *stops.tolist()]))
        if bounds is not None:
            trained = _mask(*bounds, _edges_in_bytes(texts, edges))
            yield from ((ids[a:b], trained[a:b]) for a, b in runs)
        elif len(texts) == 1:
            yield _by_offsets(self._backend.encode(texts[0], add_special_tokens=False), edges[0])
        else:
            for text, (a, b), its_edges in zip(texts, runs, edges, strict=True):
                yield from self._by_bytes([text], ids[a:b], np.array([b - a]), [its_edges])

    def _finished(self, is_completion: bool, ids: np.ndarray, trained: np.ndarray) -> Encoded:
        if is_completion:
            front, behind = self._ends(ids)
            ids = np.concatenate([front, ids, behind])
            trained = np.concatenate([np.full(len(front), not self._assistant_only_loss), trained,
                                      np.ones(len(behind), bool)])
        elif len(ids) > 1 and ids[0] == ids[1] == self._bos_id:
            ids, trained = ids[1:], trained[1:]
        truncated = len(ids) > self._max_length
        if truncated:
            if self._truncation == "drop":
                raise BadSample(LONGER)
            kept = slice(0, self._max_length) if self._truncation == "keep_start" else slice(-self._max_length, None)
            ids, trained = ids[kept], trained[kept]
        if not trained[1:].any():
            raise BadSample(BEYOND if truncated else UNTRAINED)
        return Encoded(ids, trained, truncated)


def without_post_processor(backend: Tokenizer) -> Tokenizer:
    """The tokenizer with nothing behind its model, for calls without special tokens and offsets, where that changes no
    id and takes time (0.02 of it with SmolLM2); the model is shared. The tokenizer itself where it cannot be remade."""
    bare = Tokenizer(backend.model)
    if backend.normalizer is not None:
        bare.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        bare.pre_tokenizer = backend.pre_tokenizer
    added = sorted(backend.get_added_tokens_decoder().items())
    for special, tokens in groupby((token for _, token in added), lambda token: token.special):
        (bare.add_special_tokens if special else bare.add_tokens)(list(tokens))
    bare.encode_special_tokens = backend.encode_special_tokens
    remade = sorted(bare.get_added_tokens_decoder().items())
    ids, bare_ids = (one.encode(PROBE, add_special_tokens=False).ids for one in (backend, bare))
    return bare if repr(remade) == repr(added) and ids == bare_ids else backend     # == sees the text of tokens alone


def dividers(bare: Tokenizer) -> dict[str, int]:
    """The added tokens, and their ids, at which texts can be divided: whatever stands before such a token, it, and
    whatever stands behind it have the ids that they have alone, since nothing reaches over it."""
    tokens = bare.get_added_tokens_decoder()
    if (bare.post_processor is not None or bare.encode_special_tokens
            or any(token.single_word for token in tokens.values())):
        return {}
    spelt = [token.content for token in tokens.values()]
    together = "\0".join(spelt)
    ends = {token[i:] for token in spelt for i in range(1, len(token))}
    return {
        token.content: token_id for token_id, token in tokens.items()
        if not (token.lstrip or token.rstrip or token.normalized) and together.count(token.content) == 1
        and ends.isdisjoint(token.content[:i] for i in range(1, len(token.content)))}


def _with_joints(ids: np.ndarray, stops: np.ndarray, joint: Joint) -> tuple[np.ndarray, np.ndarray]:
    """Ids and stops with the joint's own ids where a token stands for it."""
    is_joint = ids == joint.stand_in_id
    ends = np.where(is_joint, len(joint.ids), 1).cumsum()
    whole = np.repeat(ids, np.where(is_joint, len(joint.ids), 1))
    for i, token_id in enumerate(reversed(joint.ids)):
        whole[ends[is_joint] - 1 - i] = token_id
    return whole, np.append(0, ends)[stops]


class TokenBytes:
    """The bytes every token stands for, if the tokenizer is a byte-level one.

    Nothing is taken on trust: `bounds` compares the bytes of the tokens with those of the text.
    """

    def __init__(self, backend: Tokenizer) -> None:
        vocabulary = backend.get_vocab()
        spelt = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            spelt[token_id] = token.translate(BYTE_OF_LETTER).encode("latin-1", "replace")
        for token_id, added in backend.get_added_tokens_decoder().items():
            spelt[token_id] = added.content.encode()
        self._bytes = np.array(spelt, object)       # an array of them is read twice as fast as a list
        self._lengths = np.fromiter(map(len, spelt), np.int64, len(spelt))

    def bounds(self, texts: Sequence[str], ids: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Where each token starts and ends, in bytes of all texts one behind another; None where the tokens of a text,
        which end at its `stops` among `ids`, do not spell it byte by byte."""
        if b"".join(self._bytes[ids].tolist()) != "".join(texts).encode():
            return None
        lengths = self._lengths[ids]
        ends = lengths.cumsum()
        num_bytes = np.cumsum([_num_bytes(text) for text in texts], dtype=np.int64)
        return (ends - lengths, ends) if np.array_equal(np.append(0, ends)[stops], num_bytes) else None


def _letters_of_bytes() -> dict[int, int]:
    """Byte-level vocabularies write a byte as one letter: itself where it prints, else one from U+0100 on, in order."""
    printing = {*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return {256 + n: byte for n, byte in enumerate(others)}


BYTE_OF_LETTER = _letters_of_bytes()


def _edges_in_bytes(texts: Sequence[str], edges: Sequence[list[int]]) -> list[int]:
    """Places among the characters of each text as places among the UTF-8 bytes of all texts one behind another; they
    ascend. Those behind the end of a text that was cut are its end."""
    found: list[int] = []
    start = 0
    for text, its_edges in zip(texts, edges, strict=True):
        if text.isascii():
            found += [start + edge if edge < len(text) else start + len(text) for edge in its_edges]
        else:
            found += (start + np.cumsum([_num_bytes(text[a:b]) for a, b in pairwise([0, *its_edges])])).tolist()
        start += _num_bytes(text)
    return found


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _by_offsets(encoding: Encoding, edges: list[int]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    return np.array(encoding.ids, np.uint32), _mask(offsets[:, 0], offsets[:, 1], edges)


def _mask(starts: np.ndarray, ends: np.ndarray, edges: list[int]) -> np.ndarray:
    """True where a token overlaps a trained run. Tokens and runs are in order."""
    trained = np.zeros(len(starts), bool)
    firsts = ends.searchsorted(edges[0::2], side="right")
    lasts = starts.searchsorted(edges[1::2], side="left")
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        trained[first:last] = True
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

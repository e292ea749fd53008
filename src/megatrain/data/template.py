"""The tokenizer's own chat template: a conversation to text, and where in that text the trained turns stand.

The template runs in transformers' immutable sandbox, under a time limit; the date it may ask for is pinned, so the
same data give the same tokens on any day.
"""
from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2.exceptions import TemplateError

from megatrain.data.formats import BadSample, Chat
from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])([^'"\\]*)\1\s*\)""")
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PINNED_DATE = datetime(2025, 1, 1)
RENDER_LIMIT_S = 20.0
MAX_TEMPLATE_CHARS = 1 << 20
TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
PROBE_USER = {"role": "user", "content": "Q7x"}
PROBE_ASSISTANT = {"role": "assistant", "content": "A7x"}


class Span(NamedTuple):
    """Characters [start, end) of the rendered text, up to and with the turn's end-of-turn token."""
    start: int
    end: int


class _TemplateTimeout(Exception):
    pass


class ChatTemplate:
    """Renders conversations and finds their assistant turns.

    `header` is the text that opens an assistant turn (the generation prompt), `eot` the token that closes one, None
    if the template writes no such token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template, so conversations cannot be rendered; use the "
                            "instruction-tuned model's tokenizer, or data as `text` or `prompt` + `completion`")
        self._tokenizer = tokenizer
        self._sources = {with_tools: _pinned(tokenizer.get_chat_template(tools=[{}] if with_tools else None))
                         for with_tools in (False, True)}       # some tokenizers have a template of its own for tools
        self.header, self.eot = self._probe()
        self.eot_id: int | None = tokenizer.convert_tokens_to_ids(self.eot) if self.eot else None

    def marked(self, chat: Chat) -> bool:
        """Whether the template for this conversation has `{% generation %}` marks."""
        return GENERATION_MARK.search(self._sources[bool(chat.tools)]) is not None

    def render(self, messages: Messages, tools: list[Any] | None, prompt: bool = False) -> str:
        """The conversation as text; `prompt` adds the opening of the next assistant turn."""
        with _guarded():
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=self._sources[bool(tools)], tokenize=False,
                add_generation_prompt=prompt)

    def encode_marked(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Token ids and trained flags of a conversation whose template has generation marks."""
        with _guarded():
            out = self._tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, chat_template=self._sources[bool(chat.tools)], return_dict=True,
                return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False})
        return out["input_ids"], out["assistant_masks"]

    def spans(self, chat: Chat, full: str) -> list[Span]:
        """The trained turns of `full`, the rendered conversation, in order; BadSample when they cannot be told."""
        turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
        spans = self._scan(chat, full, len(turns)) or self._prefix_difference(chat, full, turns)
        return [span for i, span in zip(turns, spans, strict=True)
                if i >= chat.first_trained and chat.messages[i].get("weight", 1) != 0]

    def _probe(self) -> tuple[str, str | None]:
        """Header and end-of-turn token, read off a two-message conversation."""
        try:
            asked = self.render([PROBE_USER], None)
            prompted = self.render([PROBE_USER], None, prompt=True)
            answered = self.render([PROBE_USER, PROBE_ASSISTANT], None)
        except BadSample:
            return "", self._tokenizer.eos_token
        header = prompted[len(asked):] if prompted.startswith(asked) else ""
        tail = answered[answered.rfind(PROBE_ASSISTANT["content"]) + len(PROBE_ASSISTANT["content"]):].lstrip()
        tokens = [t for t in self._tokenizer.get_added_vocab() if tail.startswith(t)]
        return header, max(tokens, key=len, default=None)

    def _scan(self, chat: Chat, full: str, num_turns: int) -> list[Span] | None:
        """The fast way, one pass over the text: each header up to the first end-of-turn token behind it.

        Taken only when it cannot err: as many headers as assistant turns, and no message spells a header or an
        end-of-turn token itself. It also serves templates that rewrite earlier turns (dropping their reasoning),
        where no prefix of the conversation renders to a prefix of the text.
        """
        if not self.header or not self.eot or full.count(self.header) != num_turns:
            return None
        if _mentions(chat.messages, self.header.strip()) or _mentions(chat.messages, self.eot):
            return None
        spans, at = [], 0
        for _ in range(num_turns):
            start = full.index(self.header, at) + len(self.header)
            at = full.find(self.eot, start) + len(self.eot)
            if at <= start:
                return None
            spans.append(Span(start, at))
        return spans

    def _prefix_difference(self, chat: Chat, full: str, turns: list[int]) -> list[Span]:
        """The general way: a turn is what the conversation with it has over the conversation before it."""
        spans: list[Span] = []
        for i in turns:
            start = self._turn_start(chat, full, i)
            end = self._turn_end(chat, full, i, start)
            if end <= start or (spans and start < spans[-1].end):
                raise BadSample("the chat template mixes up the turns, so trained tokens cannot be told apart")
            spans.append(Span(start, end))
        return spans

    def _turn_start(self, chat: Chat, full: str, turn: int) -> int:
        if turn == 0:       # nothing before it to render: the first header is this turn's
            at = full.find(self.header) if self.header else -1
            return at + len(self.header) if at >= 0 else 0
        prompt = self.render(chat.messages[:turn], chat.tools, prompt=True)
        if full.startswith(prompt):
            return len(prompt)
        # The generation prompt goes further than the header of a finished turn (it opens a reasoning block, say).
        before = self.render(chat.messages[:turn], chat.tools)
        if not full.startswith(before):
            raise BadSample("the chat template rewrites earlier turns, so trained tokens cannot be told apart; "
                            "give the template {% generation %} marks")
        common = _common_length(prompt, full)       # it may reach into the turn: go back to the end of a line or token
        ends = [found + len(token) for token in ("\n", *self._tokenizer.get_added_vocab())
                if (found := full.rfind(token, len(before), common)) >= 0]
        return max(ends, default=len(before))

    def _turn_end(self, chat: Chat, full: str, turn: int, start: int) -> int:
        last = turn == len(chat.messages) - 1
        with_turn = full if last else self.render(chat.messages[:turn + 1], chat.tools)
        if full.startswith(with_turn):
            if self.eot is None:
                return len(with_turn)
            at = with_turn.rfind(self.eot, start)
            return at + len(self.eot) if at >= 0 else len(with_turn)
        at = full.find(self.eot, start) if self.eot else -1
        if at < 0:
            raise BadSample("the chat template rewrites earlier turns, so trained tokens cannot be told apart; "
                            "give the template {% generation %} marks")
        return at + len(self.eot)


def _pinned(source: str) -> str:
    """The template with its questions for today's date answered."""
    if len(source) > MAX_TEMPLATE_CHARS:
        raise DataError(f"the chat template is {len(source)} characters long; the limit is {MAX_TEMPLATE_CHARS}")
    return DATE_CALL.sub(lambda call: repr(PINNED_DATE.strftime(call[2])), source)


@contextmanager
def _guarded() -> Iterator[None]:
    """Faults inside a template become BadSample; so does running longer than RENDER_LIMIT_S (main thread only:
    an interval timer is the one way to stop Python code that does not cooperate)."""
    timed = threading.current_thread() is threading.main_thread()
    if timed:
        previous = signal.signal(signal.SIGALRM, _on_alarm)
        signal.setitimer(signal.ITIMER_REAL, RENDER_LIMIT_S)
    try:
        yield
    except _TemplateTimeout:
        raise BadSample(f"the chat template ran longer than {RENDER_LIMIT_S:.0f} s") from None
    except TEMPLATE_FAULTS as error:
        raise BadSample(f"the chat template refuses it: {str(error)[:120]}") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, previous)


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise _TemplateTimeout


def _mentions(value: Any, needle: str) -> bool:
    if isinstance(value, str):
        return needle in value
    if isinstance(value, Mapping):
        return any(_mentions(inner, needle) for inner in value.values())
    if isinstance(value, (list, tuple)):
        return any(_mentions(inner, needle) for inner in value)
    return False


def _common_length(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low

"""The tokenizer's own chat template: a conversation to text, and where in that text the trained turns stand.

The template runs in transformers' immutable sandbox, under a time limit; the date it may ask for is pinned, so the
same data give the same tokens on any day.
"""
from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2.exceptions import TemplateError

from megatrain.data.formats import BadSample, Chat
from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
ASSISTANT = "assistant"
DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])([^'"\\]*)\1\s*\)""")
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
PINNED_DATE = datetime(2025, 1, 1)
RENDER_LIMIT_S = 20.0
MAX_TIMEOUTS = 3        # one row may be odd; a template that never ends must not cost RENDER_LIMIT_S for every row
MAX_TEMPLATE_CHARS = 1 << 20
TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
                   MemoryError)
PROBE_USER = {"role": "user", "content": "Q7x"}
ANSWER = "A7x"
PROBE_ASSISTANT = {"role": "assistant", "content": ANSWER}
REWRITTEN = ("the chat template rewrites earlier turns, so trained tokens cannot be told apart; give the template "
             "{% generation %} marks")


class Span(NamedTuple):
    """Characters [start, end) of the rendered text, up to and with the turn's end-of-turn token."""
    start: int
    end: int


class _Alarm(Exception):
    pass


class TemplateTimeout(BadSample):
    """The row's rendering was stopped."""


class ChatTemplate:
    """Renders conversations and finds their assistant turns.

    `header` is the text that opens an assistant turn (the generation prompt). `ends` are the special tokens that close
    one, as text (gpt-oss has another for the last turn than for the others); empty if the template writes none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template, so conversations cannot be rendered; use the "
                            "instruction-tuned model's tokenizer, or data as `text` or `prompt` + `completion`")
        self._tokenizer = tokenizer
        self._timeouts = 0
        self._sources = {with_tools: _pinned(tokenizer.get_chat_template(tools=[{}] if with_tools else None))
                         for with_tools in (False, True)}       # some tokenizers have a template of its own for tools
        self._added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
        self.header = self._probe_header()
        self.ends = self._probe_ends()
        self.end_ids = {i for end in self.ends for i in tokenizer.encode(end, add_special_tokens=False)}
        self._end = re.compile("|".join(map(re.escape, sorted(self.ends, key=len, reverse=True))) or "(?!)")
        self._opener = self._leading_token(self.header) or self.header

    def marked(self, chat: Chat) -> bool:
        """Whether the template for this conversation has `{% generation %}` marks."""
        return GENERATION_MARK.search(self._sources[bool(chat.tools)]) is not None

    def render(self, messages: Messages, tools: list[Any] | None, prompt: bool = False) -> str:
        """The conversation as text; `prompt` adds the opening of the next assistant turn."""
        with self._counted(), _guarded():
            return self._tokenizer.apply_chat_template(
                list(messages), tools=tools, chat_template=self._sources[bool(tools)], tokenize=False,
                add_generation_prompt=prompt)

    def encode_marked(self, chat: Chat) -> tuple[list[int], list[int]]:
        """Token ids and trained flags of a conversation whose template has generation marks."""
        with self._counted(), _guarded():
            out = self._tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, chat_template=self._sources[bool(chat.tools)], return_dict=True,
                return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False})
        return out["input_ids"], out["assistant_masks"]

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """The last time-out of MAX_TIMEOUTS is a DataError; those before it cost their row."""
        try:
            yield
        except TemplateTimeout as bad:
            self._timeouts += 1
            if self._timeouts < MAX_TIMEOUTS:
                raise
            raise DataError(f"{bad} on {self._timeouts} conversations; it may have no end: mend the chat template of "
                            "the tokenizer, or take out the very long conversations") from None

    def spans(self, chat: Chat, full: str, roles: Set[str] = frozenset({ASSISTANT})) -> list[Span]:
        """The trained turns of `full`, the rendered conversation, in order; BadSample when they cannot be told."""
        found: dict[int, Span] = {}
        if ASSISTANT in roles:
            turns = [i for i, m in enumerate(chat.messages) if m["role"] == ASSISTANT]
            spans = self._scan(chat, full, len(turns)) or self._prefix_difference(chat, full, turns)
            found = dict(zip(turns, spans, strict=True))
        for i, message in enumerate(chat.messages):
            if message["role"] in roles - {ASSISTANT} and message["content"].strip():
                found[i] = self._spoken(chat, full, i)
        return [found[i] for i in sorted(found)
                if i >= chat.first_trained and chat.messages[i].get("weight", 1) != 0]

    def _spoken(self, chat: Chat, full: str, turn: int) -> Span:
        """The content of a turn that no generation prompt opens, and the end-of-turn token right behind it."""
        before = self.render(chat.messages[:turn], chat.tools) if turn else ""
        with_turn = self.render(chat.messages[:turn + 1], chat.tools)
        content = chat.messages[turn]["content"].strip()
        start = with_turn.rfind(content, len(before))       # the last: a header may hold the same word
        if not (with_turn.startswith(before) and full.startswith(with_turn)) or start < 0:
            raise BadSample(f"a {chat.messages[turn]['role'][:40]} turn is not in the rendered text as it is written")
        end = self._end.match(full, start + len(content))
        return Span(start, start + len(content) if end is None else end.end())

    def fitted(self, chat: Chat) -> Chat:
        """The conversation as this template takes it: some join call arguments to text, and fail on objects."""
        if not any("tool_calls" in m for m in chat.messages) or not self._wants_text_arguments:
            return chat
        return chat._replace(messages=[_with_text_arguments(m) for m in chat.messages])

    @cached_property
    def _wants_text_arguments(self) -> bool:
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        return (self._tried([PROBE_USER, called]) is None
                and self._tried([PROBE_USER, _with_text_arguments(called)]) is not None)

    def _tried(self, messages: Messages, prompt: bool = False) -> str | None:
        try:
            return self.render(messages, None, prompt)
        except BadSample:
            return None

    def _probe_header(self) -> str:
        asked, prompted = self._tried([PROBE_USER]), self._tried([PROBE_USER], prompt=True)
        if asked is None or prompted is None or not prompted.startswith(asked):
            return ""
        return prompted[len(asked):]

    def _probe_ends(self) -> tuple[str, ...]:
        """What stands behind an answer that is the last message, and behind one that is not."""
        last, inner = self._tried([PROBE_USER, PROBE_ASSISTANT]), self._tried([PROBE_USER, PROBE_ASSISTANT, PROBE_USER])
        if last is None:
            return (self._tokenizer.eos_token,) if self._tokenizer.eos_token else ()
        end, tail = "", last.rpartition(ANSWER)[2].lstrip()
        while (token := self._leading_token(tail)) and not (end and token in self.header):
            end, tail = end + token, tail[len(token):]
            if not self.header:     # nothing tells an end's second token from the opening of a next turn
                break
        if not end or inner is None:
            return (end,) if end else ()
        tail = inner.rpartition(ANSWER)[2].lstrip()
        other = self._leading_token(tail)
        return (end,) if not other or tail.startswith(end) else (end, other)

    def _leading_token(self, text: str) -> str:
        return next((token for token in self._added if text.startswith(token)), "")

    def _scan(self, chat: Chat, full: str, num_turns: int) -> list[Span] | None:
        """The fast way, one pass over the text: each header up to the first end-of-turn token behind it.

        Taken only when it cannot err: as many headers as assistant turns, nothing opened within a turn, and no message
        that spells a header or an end-of-turn token itself. It also serves templates that rewrite earlier turns
        (dropping their reasoning), where no prefix of the conversation renders to a prefix of the text.
        """
        if not self.header or not self.ends or full.count(self.header) != num_turns:
            return None
        if any(_mentions(chat.messages, spelt) for spelt in (self.header.strip(), *self.ends)):
            return None
        spans, at = [], 0
        for _ in range(num_turns):
            found = full.find(self.header, at)
            start = found + len(self.header)
            end = self._end.search(full, start)
            if found < 0 or end is None or self._opener in full[start:end.start()]:
                return None
            at = end.end()
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
            if at < 0:
                raise BadSample("it starts with an assistant turn, and the chat template has no opening for one")
            return at + len(self.header)
        prompt = self.render(chat.messages[:turn], chat.tools, prompt=True)
        if full.startswith(prompt):
            return len(prompt)
        # The generation prompt goes further than the header of a finished turn (it opens a reasoning block, say).
        before = self.render(chat.messages[:turn], chat.tools)
        if not full.startswith(before):
            raise BadSample(REWRITTEN)
        common = _common_length(prompt, full)       # it may reach into the turn: go back to the end of a line or token
        ends = [found + len(token) for token in ("\n", *self._added)
                if (found := full.rfind(token, len(before), common)) >= 0]
        return max(ends, default=len(before))

    def _turn_end(self, chat: Chat, full: str, turn: int, start: int) -> int:
        last = turn == len(chat.messages) - 1
        with_turn = full if last else self.render(chat.messages[:turn + 1], chat.tools)
        if full.startswith(with_turn):
            ends = [end.end() for end in self._end.finditer(with_turn, start)]
            return ends[-1] if ends else len(with_turn)
        end = self._end.search(full, start)
        if end is None:
            raise BadSample(REWRITTEN)
        return end.end()


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
    except _Alarm:
        raise TemplateTimeout(f"the chat template ran longer than {RENDER_LIMIT_S:.0f} s") from None
    except TEMPLATE_FAULTS as error:
        raise BadSample(f"the chat template refuses it: {str(error)[:120] or type(error).__name__}") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, previous)


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise _Alarm


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls", ()):
        target = call.get("function", call)
        if isinstance(target.get("arguments"), Mapping):
            target = {**target, "arguments": json.dumps(target["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": target} if "function" in call else target)
    return {**message, "tool_calls": calls} if calls else dict(message)


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

"""Where the trained turns of a conversation stand in the text that the tokenizer's own chat template makes of it."""
from __future__ import annotations

import json
import re
from collections.abc import Mapping, Set
from functools import cached_property
from typing import Any

from megatrain.data.formats import BadSample, Chat
from megatrain.data.sandbox import Messages, Rendered, Sandbox, Span, TemplateSource, TemplateTimeout, texts_in
from megatrain.errors import DataError

ASSISTANT = "assistant"
GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
MAX_TIMEOUTS = 3        # one row may be odd; a template that never ends must not cost RENDER_LIMIT_S for every row
PROBE_USER = {"role": "user", "content": "Q7x"}
ANSWER = "A7x"
PROBE_ASSISTANT = {"role": "assistant", "content": ANSWER}
REWRITTEN = ("the chat template rewrites earlier turns, so trained tokens cannot be told apart; give the template "
             "{% generation %} marks")


class ChatTemplate:
    """Renders conversations and finds their assistant turns: spans up to and with the end-of-turn token.

    `header` is the text that opens an assistant turn (the generation prompt). `ends` are the special tokens that close
    one, as text (gpt-oss has another for the last turn than for the others); empty if the template writes none.
    """

    def __init__(self, source: TemplateSource) -> None:
        self._eos: str | None = source.special.get("eos_token")
        self._sandboxes = {False: Sandbox(source.plain, source.special),
                           True: Sandbox(source.with_tools, source.special)}
        self._has_marks = {False: GENERATION_MARK.search(source.plain) is not None,
                           True: GENERATION_MARK.search(source.with_tools) is not None}
        self._timeouts = 0
        self._added = sorted(source.added, key=len, reverse=True)
        self.header = self._probe_header()
        self.ends = self._probe_ends()
        self.end_ids = {id_ for token, id_ in source.added.items() if any(token in end for end in self.ends)}
        self._end = re.compile("|".join(map(re.escape, sorted(self.ends, key=len, reverse=True))) or "(?!)")
        self._opener = self._leading_token(self.header) or self.header

    def marked(self, chat: Chat) -> bool:
        """Whether the template for this conversation has `{% generation %}` marks."""
        return self._has_marks[bool(chat.tools)]

    def render(self, messages: Messages, tools: list[Any] | None, prompt: bool = False) -> str:
        """The conversation as text; `prompt` adds the opening of the next assistant turn."""
        return self._rendered(messages, tools, prompt).text

    def _rendered(self, messages: Messages, tools: list[Any] | None, prompt: bool = False) -> Rendered:
        """The last time-out of MAX_TIMEOUTS is a DataError; those before it cost their row."""
        try:
            return self._sandboxes[bool(tools)].render(messages, tools, prompt)
        except TemplateTimeout as bad:
            self._timeouts += 1
            if self._timeouts < MAX_TIMEOUTS:
                raise
            raise DataError(f"{bad} on {self._timeouts} conversations; it may have no end: mend the chat template of "
                            "the tokenizer, or take out the very long conversations") from None

    def marked_turns(self, chat: Chat) -> tuple[str, list[Span]]:
        """A conversation whose template has generation marks as text, and its trained turns: what is marked, each with
        the end-of-turn tokens right behind it, since without them a model never stops."""
        full, marks = self._rendered(chat.messages, chat.tools)
        spans: list[Span] = []
        for start, end in marks:
            if start == end:
                continue
            while behind := self._end.match(full, end):
                end = behind.end()
            if spans and spans[-1].end == start:
                spans[-1] = Span(spans[-1].start, end)
            else:
                spans.append(Span(start, end))
        turns = [i for i, m in enumerate(chat.messages) if m["role"] == ASSISTANT]
        untrained = {i for i in turns if not _is_trained(chat, i)}
        if not untrained:
            return full, spans
        if len(spans) != len(turns):
            raise BadSample("the turns that are not to be trained cannot be matched with the template's marked turns")
        return full, [span for i, span in zip(turns, spans, strict=True) if i not in untrained]

    def spans(self, chat: Chat, full: str, roles: Set[str] = frozenset({ASSISTANT})) -> list[Span]:
        """The trained turns of `full`, the rendered conversation, in order; BadSample when they cannot be told."""
        found: dict[int, Span] = {}
        if ASSISTANT in roles:
            turns = [i for i, m in enumerate(chat.messages) if m["role"] == ASSISTANT]
            spans = self._scan(chat, full, len(turns)) or self._prefix_difference(chat, full, turns)
            found = dict(zip(turns, spans, strict=True))
        if others := roles - {ASSISTANT}:
            for i, message in enumerate(chat.messages):
                if message["role"] in others and message["content"].strip():
                    found[i] = self._spoken(chat, full, i)
        return [found[i] for i in sorted(found) if _is_trained(chat, i)]

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
            return (self._eos,) if self._eos else ()
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
        spoken = "\0".join(texts_in(chat.messages))
        if self.header.strip() in spoken or self._end.search(spoken):
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


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls", ()):
        target = call.get("function", call)
        if isinstance(target.get("arguments"), Mapping):
            target = {**target, "arguments": json.dumps(target["arguments"], ensure_ascii=False)}
        calls.append({**call, "function": target} if "function" in call else target)
    return {**message, "tool_calls": calls} if calls else dict(message)


def _is_trained(chat: Chat, turn: int) -> bool:
    return turn >= chat.first_trained and chat.messages[turn].get("weight", 1) != 0


def _common_length(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low

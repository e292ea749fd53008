"""Samples to texts: what the tokenizer is to read, and which characters of it are trained."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatrain.data.formats import UNTRAINED, BadSample, Chat, Completion, Document, Sample
from megatrain.data.sandbox import Span, TemplateSource
from megatrain.data.template import ASSISTANT, ChatTemplate
from megatrain.errors import DataError

Kind = Literal["document", "completion", "chat"]


class Text(NamedTuple):
    """One sample as text. `edges`: where runs of trained characters start and end, in turn; of a document all are
    trained. (Flat, since a hundred thousand small tuples keep Python's garbage collector busy for a second.)"""
    kind: Kind
    text: str
    edges: list[int]


class Texts:
    """Makes texts of samples; conversations by the chat template."""

    def __init__(self, source: TemplateSource | None, *, assistant_only_loss: bool,
                 train_roles: Sequence[str] = (ASSISTANT,)) -> None:
        self._source = source
        self._assistant_only_loss = assistant_only_loss
        self._roles = frozenset(train_roles)
        self._template: ChatTemplate | None = None

    def warnings(self) -> tuple[str, ...]:
        """What a user should know of the template in use, as sentences."""
        if self._template is not None and not self._template.ends:
            return ("the chat template closes assistant turns with no special token: the model will not learn to stop",)
        return ()

    def of(self, sample: Sample) -> Text:
        """The text of a sample; BadSample when it has none, or its trained turns cannot be told apart."""
        made = self._made(sample)
        if not made.text.isascii() and not _is_utf8(made.text):
            raise BadSample("lone surrogate or bytes that are not UTF-8 in the text")
        return made

    def _made(self, sample: Sample) -> Text:
        if isinstance(sample, Document):
            return Text("document", sample.text, [])
        if isinstance(sample, Completion):
            text = sample.prompt + sample.completion
            return Text("completion", text, [len(sample.prompt) if self._assistant_only_loss else 0, len(text)])
        text, spans = self._turns(sample)
        if not any(end > start for start, end in spans):
            raise BadSample(UNTRAINED)
        return Text("chat", text, [edge for span in spans for edge in span])

    def _turns(self, chat: Chat) -> tuple[str, list[Span]]:
        template = self._chat_template()
        chat = template.fitted(chat)
        if not self._assistant_only_loss:
            text = template.render(chat.messages, chat.tools)
            return text, [Span(0, len(text))]
        if self._roles == {ASSISTANT} and template.marked(chat):     # marks stand around the assistant's turns alone
            return template.marked_turns(chat)
        text = template.render(chat.messages, chat.tools)
        return text, template.spans(chat, text, self._roles)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            if self._source is None:
                raise DataError("the tokenizer has no chat template, so conversations cannot be rendered; use the "
                                "instruction-tuned model's tokenizer, or data as `text` or `prompt` + `completion`")
            self._template = ChatTemplate(self._source)
        return self._template


def _is_utf8(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True

"""A chat template as a function from a conversation to text, within limits.

A template comes with a model that anyone may have published. It runs in jinja's immutable sandbox, with the helpers
that transformers gives it (so it writes the same text; a test holds the two together), and within limits on time,
memory and length. The date it may ask for is pinned: the same data give the same tokens on any day.
"""
from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from megatrain.data.formats import BadSample
from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
PINNED_DATE = datetime(2025, 1, 1)
RENDER_LIMIT_S = 20.0
MAX_TEMPLATE_CHARS = 1 << 20
SPARE_BYTES = 1 << 30       # address space a rendering may take beyond what the process has…
BYTES_PER_CHAR = 64         # …and for every character it is given
SPARE_CHARS = 1 << 20       # a text may be this much longer…
GROWTH = 64                 # …than this many times what it is made of (tool lists are written out once a turn)
FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")       # names of one thing in different data sets
REASONING = frozenset(REASONING_FIELDS)
METHODS_OF_DICT = frozenset(dir(dict))
LOOP_VARIABLES = frozenset({"first", "last", "index", "index0", "previtem", "nextitem"})
PAGE_BYTES = resource.getpagesize()


class Span(NamedTuple):
    """Characters [start, end) of a text."""
    start: int
    end: int


class Rendered(NamedTuple):
    """The text of a conversation, and what stands within `{% generation %}` marks."""
    text: str
    marks: list[Span]


class TemplateTimeout(BadSample):
    """The row's rendering was stopped."""


class _Alarm(BaseException):
    """Not an Exception: jinja catches those while it folds constants."""


@dataclass(frozen=True)
class TemplateSource:
    """A tokenizer's chat template as plain data, and what it needs of the tokenizer.

    `special`: the variables that hold special tokens (`bos_token` …). `added`: the tokens that are found in text before
    any other, and their ids.
    """
    plain: str
    with_tools: str             # some tokenizers have a template of its own for conversations with tools
    special: Mapping[str, Any]
    added: Mapping[str, int]


def source_of(tokenizer: PreTrainedTokenizerBase) -> TemplateSource | None:
    """The chat template of a tokenizer; None when it has none."""
    if not tokenizer.chat_template:
        return None
    plain, with_tools = (tokenizer.get_chat_template(tools=tools) for tools in (None, [{}]))
    for source in (plain, with_tools):
        if len(source) > MAX_TEMPLATE_CHARS:
            raise DataError(f"the chat template is {len(source)} characters long; the limit is {MAX_TEMPLATE_CHARS}")
    return TemplateSource(plain, with_tools, dict(tokenizer.special_tokens_map), tokenizer.get_added_vocab())


class Sandbox:
    """One template, compiled at its first use, within the limits of a rendering.

    It takes the process's SIGALRM, for good: a change of handler for every row took as long as the row's rendering.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        signal.signal(signal.SIGALRM, _on_alarm)
        self._source = source
        self._variables = variables
        self._environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._environment.filters["tojson"] = _to_json
        self._environment.globals |= {"raise_exception": _refuse, "strftime_now": PINNED_DATE.strftime,
                                      "dict": lambda *args, **named: dict(*args, **named), "namespace": _Namespace}
        marks = self._environment.extensions[_Generation.identifier]
        assert isinstance(marks, _Generation)
        self._marks = marks

    @cached_property
    def _template(self) -> jinja2.Template:
        template = self._environment.from_string(self._source)
        template.globals = dict(template.globals)   # read for every row, a fifth of its time as the chain that it was
        return template

    def render(self, messages: Messages, tools: list[Any] | None, prompt: bool = False) -> Rendered:
        """The conversation as text; BadSample where the template refuses it, or takes too much of anything."""
        num_chars = num_chars_in([messages, tools])
        limit_chars = SPARE_CHARS + GROWTH * num_chars
        blocks: list[str] = []
        made_chars = 0
        with _limited(SPARE_BYTES + BYTES_PER_CHAR * num_chars):
            self._marks.begin()
            for block in self._template.generate(
                    messages=[_with_reasoning(m) for m in messages], tools=tools, documents=None,
                    add_generation_prompt=prompt, **self._variables):
                blocks.append(block)
                made_chars += len(block)
                self._marks.num_chars = made_chars
                if made_chars > limit_chars:
                    raise BadSample(f"the chat template makes more than {limit_chars} characters of {num_chars}")
            return Rendered("".join(blocks), self._marks.found)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox with a short way for what templates ask for most, and what is always safe: `m.role`, `loop.last`.
    (The long way looks at the kind of object and at every kind of forbidden name: half of a rendering.)"""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in METHODS_OF_DICT:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in LOOP_VARIABLES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


class _Generation(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}`: notes where its text stands."""
    tags = {"generation"}  # noqa: RUF012 - jinja's own spelling

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.begin()

    def begin(self) -> None:
        self.num_chars = 0              # of the text before the block that is being made
        self.found: list[Span] = []

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Macro) -> str:
        text = caller()
        self.found.append(Span(self.num_chars, self.num_chars + len(text)))
        return text


class _Namespace(Namespace):
    """jinja's namespace without attributes that begin with an underscore: the way to a class and out of the sandbox."""

    def __init__(*args: Any, **named: Any) -> None:      # `self` among the names is the template's
        for name in dict(*args[1:], **named):
            _refuse_underscore(name)
        Namespace.__init__(*args, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace takes no attribute {name[:40]!r}")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
             sort_keys: bool = False) -> str:
    """JSON as it is: jinja's own filter writes HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reasoning under the names that templates read, whichever the row has."""
    if REASONING.isdisjoint(message):
        return message
    given = next((message[key] for key in REASONING_FIELDS if message.get(key) is not None), None)
    return message if given is None else {"thinking": given, **message, "reasoning_content": given}


def texts_in(value: Any) -> list[str]:
    """All texts in a JSON value, the names of fields aside."""
    texts: list[str] = []
    waiting: list[Any] = [[value]]
    for inner in waiting:       # it grows meanwhile
        for one in inner.values() if isinstance(inner, dict) else inner:
            if isinstance(one, str):
                texts.append(one)
            elif isinstance(one, (dict, list)):
                waiting.append(one)
    return texts


def num_chars_in(value: Any) -> int:
    """Characters of all texts in a JSON value."""
    return sum(map(len, texts_in(value)))


@contextmanager
def _limited(spare_bytes: int) -> Iterator[None]:
    """Faults inside become BadSample; so do running longer than RENDER_LIMIT_S and taking more than `spare_bytes` of
    address space. For the main thread: an interval timer stops Python code that does not cooperate, and the limit on
    memory counts for the whole process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(os.pread(_statm(), 32, 0).split(maxsplit=1)[0]) * PAGE_BYTES + spare_bytes
    for given in (soft, hard):
        if given != resource.RLIM_INFINITY:
            limit = min(limit, given)
    signal.setitimer(signal.ITIMER_REAL, RENDER_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except _Alarm:
        raise TemplateTimeout(f"the chat template ran longer than {RENDER_LIMIT_S:.0f} s") from None
    except MemoryError:
        raise BadSample(f"the chat template asks for more than {spare_bytes / 2**30:.0f} GiB") from None
    except FAULTS as error:
        raise BadSample(f"the chat template refuses it: {str(error)[:120] or type(error).__name__}") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0.0)


@cache
def _statm() -> int:
    """This process's account of its memory, open: opening it for every row took as long as the row's rendering."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def _on_alarm(_number: int, _frame: FrameType | None) -> None:
    raise _Alarm

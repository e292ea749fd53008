"""Rows to samples: which format a row is of, and the same three kinds of sample for all of them."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from megatrain.data.options import FORMATS, KEYS, Format
from megatrain.data.rows import Row
from megatrain.errors import DataError

ACCEPTED = ("accepted are `messages`, `text`, `prompt` + `completion`, `instruction` + `output` (Alpaca) "
            "and `conversations` (ShareGPT)")
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "model": "assistant", "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool", "function_call": "assistant",
}


class Document(NamedTuple):
    """Plain text; every token is trained."""
    text: str


class Completion(NamedTuple):
    """Plain text in two parts; the second is trained."""
    prompt: str
    completion: str


class Chat(NamedTuple):
    """A conversation for the chat template; assistant turns at index >= `first_trained` are trained."""
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    first_trained: int


Sample = Document | Completion | Chat


# Reasons that have a remedy of their own.
BEYOND = "all trained tokens lie beyond max_length"
LONGER = "longer than max_length"
UNTRAINED = "no token of it is trained"
REMEDIES = {
    BEYOND: "raise max_length, or set truncation: keep_end",
    LONGER: "raise max_length, or set truncation: keep_start",
    UNTRAINED: "look for `train: false`, `weight: 0` and empty answers, or train other roles (train_roles)",
}


class BadSample(Exception):
    """This row is left out; the text is the reason in the report. Rows with one reason are counted together."""


def detect(rows: Iterable[Row]) -> Format | None:
    """The format of the first row that is of one, by its keys; None when no row could be read at all.

    Raises DataError for preference pairs, and, naming the keys found, when no readable row is of a known format.
    """
    unknown: Row | None = None
    for row in rows:
        if row.value is None:
            continue
        if found := _detect_row(row):
            return found
        unknown = unknown or row
    if unknown is None:
        return None
    keys = ", ".join(sorted(map(str, unknown.value or ()))) or "none"
    raise DataError(f"dataset {unknown.file} line {unknown.line} is of no known format: keys found: {keys}; "
                    f"{ACCEPTED}")


def _detect_row(row: Row) -> Format | None:
    assert row.value is not None
    keys = {key for key, value in row.value.items() if value is not None}
    if {"chosen", "rejected"} <= keys:
        raise DataError(f"dataset {row.file} line {row.line} holds preference pairs (`chosen`, `rejected`); training "
                        f"on preferences is planned, not there yet: {ACCEPTED}")
    return next((row_format for row_format, needed in KEYS.items() if needed <= keys), None)


def to_sample(value: Mapping[str, Any], row_format: Format) -> Sample:
    """The sample in a row of this format, or BadSample."""
    return _READERS[row_format](value)


def _text_of(value: Mapping[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise BadSample(f"`{key}` is {'missing' if text is None else type(text).__name__}, not text")
    return text


def _text(value: Mapping[str, Any]) -> Document:
    text = _text_of(value, "text")
    if not text:
        raise BadSample("`text` is empty")
    return Document(text)


def _prompt_completion(value: Mapping[str, Any]) -> Sample:
    prompt, completion = value.get("prompt"), value.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        prompt_messages = [_message(m) for m in prompt]
        messages = prompt_messages + [_message(m) for m in completion]
        return _chat(messages, value.get("tools"), first_trained=len(prompt_messages))
    sample = Completion(_text_of(value, "prompt"), _text_of(value, "completion"))
    if not sample.completion:
        raise BadSample("`completion` is empty")
    return sample


def _messages(value: Mapping[str, Any]) -> Chat:
    return _chat([_message(m) for m in _list_of(value, "messages")], value.get("tools"))


def _alpaca(value: Mapping[str, Any]) -> Chat:
    messages: list[dict[str, Any]] = []
    if value.get("system"):
        messages.append({"role": "system", "content": _text_of(value, "system")})
    for turn in value.get("history") or []:
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(t, str) for t in turn)):
            raise BadSample("`history` is not a list of [instruction, output] pairs")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    query = _text_of(value, "instruction")
    if value.get("input"):
        query = f"{query}\n{_text_of(value, 'input')}" if query else _text_of(value, "input")
    messages += [{"role": "user", "content": query}, {"role": "assistant", "content": _text_of(value, "output")}]
    return _chat(messages, value.get("tools"))


def _sharegpt(value: Mapping[str, Any]) -> Chat:
    messages: list[dict[str, Any]] = []
    if value.get("system"):
        messages.append({"role": "system", "content": _text_of(value, "system")})
    for turn in _list_of(value, "conversations"):
        if not isinstance(turn, Mapping):
            raise BadSample("a turn is not an object")
        if "role" in turn and "from" not in turn:
            messages.append(_message(turn))
            continue
        speaker = turn.get("from")
        if not isinstance(speaker, str) or speaker.lower() not in SHAREGPT_ROLES:
            raise BadSample(f"speaker {str(speaker)[:40]!r} is not known")
        flags = {key: turn[key] for key in ("train", "weight") if turn.get(key) is not None}
        messages.append(_with_weight({**_sharegpt_turn(speaker.lower(), _text_of(turn, "value")), **flags}))
    return _chat(messages, value.get("tools"))


def _sharegpt_turn(speaker: str, text: str) -> dict[str, Any]:
    if speaker != "function_call":
        return {"role": SHAREGPT_ROLES[speaker], "content": text}
    calls = _parsed(text)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise BadSample("a function_call turn is not a JSON object with a name")
    return _message({"role": "assistant", "content": "",
                     "tool_calls": [{"type": "function", "function": dict(call)} for call in calls]})


def _chat(messages: list[dict[str, Any]], tools: Any, first_trained: int = 0) -> Chat:
    if isinstance(tools, str):
        tools = _parsed(tools) if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise BadSample("`tools` is not a list")
    if not messages:
        raise BadSample("no messages")
    if not any(m["role"] == "assistant" for m in messages[first_trained:]):
        raise BadSample("no assistant turn")
    return Chat(messages, tools or None, first_trained)


def _list_of(value: Mapping[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    if isinstance(found, str):      # CSV and some Parquet files carry the list as JSON text
        found = _parsed(found)
    if not isinstance(found, list):
        raise BadSample(f"`{key}` is {'missing' if found is None else type(found).__name__}, not a list")
    return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _message(message: Any) -> dict[str, Any]:
    """One message with all its own fields kept; absent ones (None) dropped, text parts joined, call arguments
    given as JSON text made objects (templates write them out as JSON themselves)."""
    if not isinstance(message, dict):
        raise BadSample("a message is not an object")
    if not isinstance(message.get("role"), str):
        raise BadSample("a message has no role")
    kept = {key: value for key, value in message.items() if value is not None}
    if not isinstance(kept.get("content"), str):
        kept["content"] = _content(kept.get("content"))
    if "tool_calls" in kept:
        if not isinstance(kept["tool_calls"], list):
            raise BadSample("`tool_calls` is not a list")
        kept["tool_calls"] = [_tool_call(call) for call in kept["tool_calls"]]
    return _with_weight(kept) if "train" in kept or "weight" in kept else kept


def _with_weight(message: dict[str, Any]) -> dict[str, Any]:
    """`train: false`, or `weight: 0`: the turn is read, and not trained. Kept as `weight`."""
    train = message.pop("train", None)
    if train is not None:
        if not isinstance(train, bool):
            raise BadSample("a message's `train` is neither true nor false")
        if message.get("weight", train) not in (train, int(train)):
            raise BadSample("a message's `train` and `weight` disagree")
        message["weight"] = int(train)
    if "weight" in message and message["weight"] not in (0, 1):
        raise BadSample("a message weight is neither 0 nor 1")
    return message


def _content(content: Any) -> str:
    if content is None:
        return ""
    if not isinstance(content, list):
        raise BadSample(f"message content is {type(content).__name__}, not text")
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
             for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise BadSample("message content has parts that are not text")
    return "".join(texts)


def _tool_call(call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise BadSample("a tool call is not an object")
    call = {key: value for key, value in call.items() if value is not None}
    target = call.get("function", call)
    if not isinstance(target, Mapping) or not isinstance(target.get("name"), str):
        raise BadSample("a tool call has no function name")
    target = dict(target)
    if isinstance(target.get("arguments"), str):
        arguments = _parsed(target["arguments"])
        target["arguments"] = arguments if isinstance(arguments, Mapping) else target["arguments"]
    return {**call, "function": target} if "function" in call else target


_READERS: Mapping[Format, Callable[[Mapping[str, Any]], Sample]] = {
    "messages": _messages, "text": _text, "prompt_completion": _prompt_completion, "alpaca": _alpaca,
    "sharegpt": _sharegpt,
}
assert set(_READERS) == set(FORMATS)

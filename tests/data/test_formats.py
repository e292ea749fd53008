"""Rows of every format become the same three kinds of sample."""
from __future__ import annotations

from typing import Any

import pytest

from megatrain.data.formats import BadSample, Chat, Completion, Document, detect, to_sample
from megatrain.data.rows import Row
from megatrain.errors import DataError

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}


def rows(*values: Any) -> list[Row]:
    return [Row("f.jsonl", i + 1, value, None if value is not None else "not JSON") for i, value in enumerate(values)]


@pytest.mark.parametrize(("value", "row_format", "sample"), [
    ({"messages": [HI, YES], "id": 3}, "messages", Chat([HI, YES], None, 0)),
    ({"text": "a"}, "text", Document("a")),
    ({"prompt": "a", "completion": "b"}, "prompt_completion", Completion("a", "b")),
    ({"prompt": [HI], "completion": [YES]}, "prompt_completion", Chat([HI, YES], None, 1)),
    ({"instruction": "hi", "input": "", "output": "yes"}, "alpaca", Chat([HI, YES], None, 0)),
    ({"instruction": "hi", "input": "so", "output": "yes", "system": "s", "history": [["hi", "yes"]]}, "alpaca",
     Chat([{"role": "system", "content": "s"}, HI, YES, {"role": "user", "content": "hi\nso"}, YES], None, 0)),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "tools": "[{\"a\": 1}]"},
     "sharegpt", Chat([HI, YES], [{"a": 1}], 0)),
    ({"conversations": [HI, YES], "tools": ""}, "sharegpt", Chat([HI, YES], None, 0)),
])
def test_formats(value: dict[str, Any], row_format: Any, sample: Any) -> None:
    assert detect(rows(value)) == row_format
    assert to_sample(value, row_format) == sample


def test_message_fields_are_kept_and_call_arguments_become_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": [1]}"}}
    messages = [HI, {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call], "name": None
                     },
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a"},
                                                                   {"type": "text", "text": "b"}]}, YES]
    sample = to_sample({"messages": messages, "tools": [{"type": "function"}]}, "messages")
    assert sample == Chat([
        HI, {"role": "assistant", "content": "", "reasoning_content": "hm",
             "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": [1]}}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "ab"}, YES], [{"type": "function"}], 0)


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"train": False, "weight": 0}])
def test_per_message_flags_in_messages_and_sharegpt(flag: dict[str, Any]) -> None:
    """`train: false` is `weight: 0`; the template never sees `train`."""
    openai = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **flag}]}
    sharegpt = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", **flag}]}
    for value, row_format in ((openai, "messages"), (sharegpt, "sharegpt")):
        sample = to_sample(value, row_format)
        assert isinstance(sample, Chat)
        assert sample.messages[1] == {"role": "assistant", "content": "a", "weight": 0}
    openai["messages"][1] = {"role": "assistant", "content": "a", "train": True, "weight": None}
    assert to_sample(openai, "messages").messages[1]["weight"] == 1


@pytest.mark.parametrize(("flag", "reason"), [
    ({"train": "no"}, "a message's `train` is neither true nor false"),
    ({"train": False, "weight": 1}, "a message's `train` and `weight` disagree"),
    ({"weight": 0.5}, "a message weight is neither 0 nor 1"),
])
def test_flags_that_cannot_be_followed(flag: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadSample, match=reason):
        to_sample({"messages": [{"role": "assistant", "content": "a", **flag}]}, "messages")


def test_sharegpt_function_call() -> None:
    value = {"conversations": [{"from": "human", "value": "hi"},
                               {"from": "function_call", "value": "{\"name\": \"f\", \"arguments\": {\"x\": 1}}"},
                               {"from": "observation", "value": "7"}, {"from": "gpt", "value": "yes"}]}
    sample = to_sample(value, "sharegpt")
    assert isinstance(sample, Chat)
    assert [m["role"] for m in sample.messages] == ["user", "assistant", "tool", "assistant"]
    assert sample.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


@pytest.mark.parametrize(("value", "row_format", "reason"), [
    ({"messages": "hi"}, "messages", "not a list"),
    ({"messages": []}, "messages", "no messages"),
    ({"messages": [HI]}, "messages", "no assistant turn"),
    ({"messages": [HI, 3]}, "messages", "not an object"),
    ({"messages": [{"content": "x"}, YES]}, "messages", "no role"),
    ({"messages": [{"role": "user", "content": 3}, YES]}, "messages", "not text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, YES]}, "messages", "parts that are not text"),
    ({"messages": [HI, {**YES, "tool_calls": [{"id": 1}]}]}, "messages", "no function name"),
    ({"messages": [HI, {**YES, "weight": 2}]}, "messages", "weight"),
    ({"messages": [HI, YES], "tools": 3}, "messages", "`tools`"),
    ({"text": None}, "text", "missing"),
    ({"text": ""}, "text", "empty"),
    ({"text": ["a"]}, "text", "list, not text"),
    ({"prompt": "a", "completion": ""}, "prompt_completion", "empty"),
    ({"prompt": "a"}, "prompt_completion", "missing"),
    ({"prompt": [YES], "completion": [HI]}, "prompt_completion", "no assistant turn"),
    ({"instruction": "a", "output": 1}, "alpaca", "int, not text"),
    ({"instruction": "a", "output": "b", "history": ["x"]}, "alpaca", "history"),
    ({"conversations": [{"from": "alien", "value": "x"}]}, "sharegpt", "alien"),
    ({"conversations": [{"from": "function_call", "value": "x"}]}, "sharegpt", "function_call"),
])
def test_bad_samples_say_why(value: dict[str, Any], row_format: Any, reason: str) -> None:
    with pytest.raises(BadSample, match=reason):
        to_sample(value, row_format)


def test_preference_pairs_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"line 2 holds preference pairs .* planned"):
        detect(rows(None, {"prompt": "a", "chosen": "b", "rejected": "c"}))


def test_unknown_keys_are_named_with_what_is_accepted() -> None:
    with pytest.raises(DataError, match=r"f\.jsonl line 2 .*keys found: body, title; accepted are `messages`"):
        detect(rows(None, {"title": "a", "body": "b"}))
    assert detect(rows({"title": "a"}, {"text": "b"})) == "text"
    assert detect(rows(None, None)) is None
    assert detect(rows({"messages": None, "text": "a"})) == "text"

"""JSON as this program reads it: one object, no key twice; as a dataclass, no unknown key, no value of another type."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from reprlib import repr as shortened
from types import GenericAlias
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatrain.errors import UserError

T = TypeVar("T")
DAMAGED = "the file is damaged, fetch or write it again"


def strict_json(data: bytes, where: object, error: type[UserError], remedy: str = DAMAGED) -> dict[str, Any]:
    """The JSON object in `data`; a duplicate key, or anything that is not one JSON object, is the given error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            raise ValueError(f"key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r} appears twice")
        return members

    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as failure:
        raise error(f"{where}: not valid JSON ({failure}); {remedy}") from failure
    if not isinstance(found, dict):
        raise error(f"{where}: a JSON object is expected, not {type(found).__name__}; {remedy}")
    return found


def typed(kind: type[T], data: bytes, where: object, error: type[UserError], remedy: str, within: str = "") -> T:
    """The JSON in `data`, or what stands there under the key `within`, as a `kind`: a dataclass or NamedTuple."""
    table = strict_json(data, where, error, remedy)
    alone: Any = GenericAlias(tuple, (kind,))  # dataclasses take a configuration only from what they stand in
    try:
        return _adapter(alone).validate_json(json.dumps([table.get(within, table)]))[0]
    except ValidationError as failure:
        raise error(f"{where}: {_sentence(kind, failure.errors()[0])}; {remedy}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


def _sentence(kind: Any, detail: ErrorDetails) -> str:
    path, message = detail["loc"][1:], detail["msg"].removeprefix("Value error, ")
    name = ".".join(map(str, path)).removesuffix(".[key]") or "all of it"
    if detail["type"].startswith("missing"):
        return f"{name} is missing"
    if detail["type"] not in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{name} is {shortened(detail['input'])}: {message[0].lower()}{message[1:]}"
    for part in path[:-1]:
        kind = get_type_hints(kind)[part] if isinstance(part, str) else kind
        while get_args(kind):  # tuple[SegmentPlan, ...], Gpu | None
            kind = get_args(kind)[0]
    return f"unknown key {path[-1]!r}; {kind.__name__} has {', '.join(get_type_hints(kind))}"

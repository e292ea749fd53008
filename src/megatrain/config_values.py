"""Types of config values that YAML has no word for: sizes with units, budgets, parts of a dataset. No torch."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic_core import ErrorDetails

STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
UNITS_BYTES = {
    "B": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
MOST_BYTES = 10**9 * UNITS_BYTES["TiB"]  # far more than there is, far less than a float holds
_WRITE = f'write a size with its unit, one of {", ".join(UNITS_BYTES)}: for example "24GiB"'
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]i?B|B)")


def parse_size(value: object) -> object:
    """Bytes of "24GiB", "512 MiB", "1.5TB"; anything else is returned as it is, for pydantic to refuse."""
    if value is None:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"it may not be negative; {_WRITE}" if str(value).strip().startswith("-") else _WRITE)
    if float(match[1]) * UNITS_BYTES[match[2]] > MOST_BYTES:
        raise ValueError(f"give at most {format_size(MOST_BYTES)}, or leave it out")
    return int(Decimal(match[1]) * UNITS_BYTES[match[2]])


def format_size(num_bytes: int) -> str:
    """The shortest exact spelling that `parse_size` reads back: 25769803776 -> "24GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % UNITS_BYTES[unit] == 0:
            return f"{num_bytes // UNITS_BYTES[unit]}{unit}"
    return f"{num_bytes}B"


Size = Annotated[
    int | None,
    BeforeValidator(parse_size),
    PlainSerializer(lambda num_bytes: None if num_bytes is None else format_size(num_bytes)),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": f"^{_SIZE.pattern}$"}, {"type": "null"}]}),
]


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("no name of a file has a NUL character in it")
    return text


Factor = Annotated[float | None, Field(gt=0, le=1e9)]  # rows times far more, or a sum of such weights, is infinite
PathText = Annotated[str, Field(min_length=1), AfterValidator(_no_nul)]


def what_is_wrong(detail: ErrorDetails) -> str:
    """Why a value was refused, in our words where pydantic's speak of Python."""
    if detail["input"] is None:
        return "it may not be empty: give a value, or leave the key out"
    if detail["type"] in ("too_short", "string_too_short"):
        return "it may not be empty"
    if detail["type"] in ("model_type", "dict_type"):
        return "write its members in braces, for example {hbm: 40GiB, ram: 400GiB}"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}"


class Memory(BaseModel):
    """Budgets of the three tiers; null means what the machine has."""

    model_config = STRICT
    hbm: Size = Field(default=None, description="GPU memory the run may use")
    ram: Size = Field(default=None, description="host memory the run may use")
    disk: Size = Field(default=None, description="disk space that checkpoints and state on disk may use")
    disk_tbw: Size = Field(default=None, description="bytes that the drive is rated to have written: its TBW", gt=0)
    disk_max_written: Size = Field(default=None, description="bytes that the run may write to the drive")


class DatasetPart(BaseModel):
    """One of several datasets. `repeat`: how often an epoch holds its rows; `weight`: its share of the epoch's rows."""

    model_config = STRICT
    path: PathText = Field(description="file or folder of rows")
    format: Literal["messages", "text", "prompt_completion", "alpaca", "sharegpt"] | None = Field(
        default=None, description="format of the rows; null: detected"
    )
    repeat: Factor = Field(default=None, description="times an epoch holds its rows; 0.5: half of them")
    weight: Factor = Field(default=None, description="share of the epoch's rows, against the other weights")

"""What is asked of the data room and what it reports back: plain frozen records, no torch."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatrain.errors import ConfigError

Format = Literal["messages", "text", "prompt_completion", "alpaca", "sharegpt"]
Truncation = Literal["keep_start", "keep_end", "drop"]
FORMATS: tuple[Format, ...] = ("messages", "text", "prompt_completion", "alpaca", "sharegpt")
# What a row must have to be of a format; the first one that fits counts.
KEYS: Mapping[Format, frozenset[str]] = {
    "messages": frozenset({"messages"}), "sharegpt": frozenset({"conversations"}),
    "prompt_completion": frozenset({"prompt", "completion"}), "alpaca": frozenset({"instruction", "output"}),
    "text": frozenset({"text"}),
}
TRUNCATIONS: tuple[Truncation, ...] = ("keep_start", "keep_end", "drop")


@dataclass(frozen=True)
class DataOptions:
    """One dataset as the user named it. `format=None` means: read it from the rows.

    `truncation` says what happens to a chat sample longer than `max_length` tokens; documents (`text`) are cut
    into pieces instead, and lose nothing. `train_roles`: whose turns are trained with `assistant_only_loss`.
    """
    paths: tuple[Path, ...]
    max_length: int
    cache_dir: Path
    format: Format | None = None
    assistant_only_loss: bool = True
    train_roles: tuple[str, ...] = ("assistant",)
    truncation: Truncation = "keep_start"

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("dataset names no file; give the path of a JSON, JSONL, CSV, TSV, Parquet or Arrow file")
        if self.max_length < 2:
            raise ConfigError(f"max_length is {self.max_length}; a sample needs at least 2 tokens to predict one")
        if self.format is not None and self.format not in FORMATS:
            raise ConfigError(f"dataset format {self.format!r} is not known; use one of {', '.join(FORMATS)}")
        if self.truncation not in TRUNCATIONS:
            raise ConfigError(f"truncation {self.truncation!r} is not known; use one of {', '.join(TRUNCATIONS)}")


@dataclass(frozen=True)
class BadRow:
    """A row that was left out: where it stands (line or row number from 1) and why."""
    file: str
    line: int
    reason: str


@dataclass(frozen=True)
class Report:
    """The account of a prepared dataset; `rows_in == rows_out + sum(reasons.values())` always holds.

    `bad_rows` lists the first `MAX_LISTED` of them; all are in `bad_rows.jsonl` of the cache folder.
    `length_histogram` maps an upper bound in tokens (a power of two) to the number of samples of at most that length.
    """
    format: Format
    rows_in: int
    rows_out: int
    num_tokens: int
    num_trained: int
    num_truncated: int
    longest_tokens: int
    reasons: Mapping[str, int] = field(default_factory=dict)
    bad_rows: tuple[BadRow, ...] = ()
    length_histogram: Mapping[int, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def trained_share(self) -> float:
        """Trained tokens over all tokens, 0 to 1."""
        return self.num_trained / self.num_tokens if self.num_tokens else 0.0


MAX_LISTED = 1000

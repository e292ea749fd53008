"""Writing data files and naming them."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import DataOptions


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: list[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path
    return write


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., DataOptions]:
    def make(*paths: Path, max_length: int = 64, **rest: Any) -> DataOptions:
        return DataOptions(paths, max_length=max_length, cache_dir=tmp_path / "cache", **rest)
    return make

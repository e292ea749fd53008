"""Writing data files and naming them."""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import DataOptions
from megatrain.data.reader import Batch, Request, read_texts
from megatrain.data.texts import Texts


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


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading in the test's own process: a fifth of a second less for every dataset."""
    def read(request: Request) -> Iterator[Batch]:
        texts = Texts(request.template, assistant_only_loss=request.assistant_only_loss,
                      train_roles=request.train_roles)
        batches = list(read_texts(request, texts))      # here and now: signals are for the main thread
        return (batch for batch in batches)
    monkeypatch.setattr(import_module("megatrain.data.prepare"), "texts_from_process", read)

"""The GPU's pool grows by pages, unless the user has said how it is to grow."""

from __future__ import annotations

import os

import pytest

from megatrain.cli import main

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, {NEW: "expandable_segments:True"}),
        ({NEW: "backend:native"}, {NEW: "backend:native"}),
        ({OLD: "max_split_size_mb:64"}, {OLD: "max_split_size_mb:64"}),
    ],
)
def test_what_the_user_says_counts(
    given: dict[str, str], want: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (NEW, OLD):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["megatrain", "--version"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    assert {name: os.environ[name] for name in (NEW, OLD) if name in os.environ} == want

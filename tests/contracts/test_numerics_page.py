"""docs/numerics.md names tests that exist, for every promise about numbers, and says what the program says."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/numerics.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_a_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_every_promise_has_a_proof() -> None:
    parts = dict(re.findall(r"^### (A\d+) · (.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL))
    assert list(parts) == [f"A{number}" for number in range(1, 12)]
    for promise, text in parts.items():
        assert "*Proof" in text, promise
        assert re.search(r"`tests/[\w/]+\.py::\w+`", text), promise


def test_commands_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"^make ([\w-]+)", PAGE, re.MULTILINE):
        assert f"\n{target}:" in makefile, target
    for module in re.findall(r"python -m (tests[\w.]+)", PAGE):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_figures_of_the_trainer_are_those_of_the_result() -> None:
    result = json.loads((ROOT / "bench/results/against_trainer.json").read_text("utf-8"))
    first = result["runs"]["Trainer, fp32"]["losses"]
    for name, run in result["runs"].items():
        worst = max(abs(a - b) for a, b in zip(run["losses"], first, strict=True))
        row = f"| {name} | {run['losses'][-1]:.4f} | {worst:.1e} | {run['apart']:.1e} |"
        assert row in PAGE, row

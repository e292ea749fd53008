"""The pages for people say what the program says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEADING = re.compile(r"^### `(.+)`$", re.MULTILINE)


def sentences() -> str:
    """Every string of the source, one a line, `…` where a value is put in."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


SENTENCES = sentences()
PHRASES = HEADING.findall((ROOT / "docs/faq.md").read_text("utf-8"))


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_question_is_keyed_by_words_the_program_says(phrase: str) -> None:
    assert phrase in SENTENCES, "the message changed: change docs/faq.md too"


def test_questions_are_found_and_asked_once() -> None:
    assert len(PHRASES) > 30
    assert len(set(PHRASES)) == len(PHRASES)
    assert "the moon is … cheese" not in SENTENCES


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_pages_name_files_that_exist(page: Path) -> None:
    named = re.findall(r"`((?:docs|tests|bench|csrc|src)/[\w./-]+)`", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_extras_of_the_install_page_are_those_of_the_package() -> None:
    text = (ROOT / "docs/install.md").read_text("utf-8")
    named = set(re.findall(r"^\| `megatrain\[(\w+)\]`", text, re.MULTILINE)) | set(re.findall(r"`\[(\w+)\]`", text))
    section = (ROOT / "pyproject.toml").read_text("utf-8").split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert named == set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))


DEFINED = re.compile(r"def (\w+)\(((?:[^()]|\([^()]*\))*)\)")


def signatures() -> dict[str, list[tuple[str, ...]]]:
    """Name -> the parameters of every function of the package that is called so."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef):
                given = node.args
                variadic = [given.vararg] if given.vararg else []
                names = [a.arg for a in (*given.posonlyargs, *given.args, *variadic, *given.kwonlyargs)]
                found.setdefault(node.name, []).append(tuple(names))
    return found


def test_signatures_of_the_architecture_page_are_those_of_the_program() -> None:
    """The page may leave out the last parameters; it may not name others, or in another order."""
    known = signatures()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/architecture.md").read_text("utf-8"), re.DOTALL)
    shown = DEFINED.findall("\n".join(blocks))
    assert len(shown) > 30
    for name, parameters in shown:
        words = re.sub(r"\[[^]]*]", "", parameters).split(",")
        named = tuple(filter(None, (re.split("[:=]", word)[0].strip(" *\n") for word in words)))
        assert any(real[: len(named)] == named for real in known.get(name, ())), f"{name}{named}: {known.get(name)}"

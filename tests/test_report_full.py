"""The report of the full list: what failed stays visible, what passed is not repeated, what is long is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.report_full import NAMED, PAGE, Recorder, Row, page, read_rows

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[1]
PLAYED = """
import pytest

def test_good(): pass
def test_bad(): assert 1 == 2, "one is not two"
@pytest.mark.skip(reason="no moon")
def test_left_out(): pass
@pytest.fixture
def broken(): yield; raise OSError("broken at the end")
def test_broken_behind(broken): pass
"""


def test_every_outcome_is_recorded_and_what_passed_is_not_repeated(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makepyfile(test_four=PLAYED)
    report = tmp_path / "report.jsonl"
    pytester.inline_run(plugins=[Recorder(report, frozenset(), "abc")])
    rows = {row.test.split("::")[1]: row for row in read_rows(report)}
    outcomes = {name: row.outcome for name, row in rows.items()}
    assert outcomes == {"test_good": "passed", "test_bad": "failed", "test_left_out": "skipped",
                        "test_broken_behind": "failed"}  # fmt: skip
    assert "one is not two" in rows["test_bad"].why
    assert "no moon" in rows["test_left_out"].why
    assert "broken at the end" in rows["test_broken_behind"].why
    pytester.makepyfile(test_four=PLAYED.replace("1 == 2", "2 == 2"))
    pytester.inline_run(plugins=[Recorder(report, frozenset({"test_four.py::test_good"}), "def")])
    rows = {row.test.split("::")[1]: row for row in read_rows(report)}
    assert [rows[name].commit for name in ("test_good", "test_bad")] == ["abc", "def"]
    assert rows["test_bad"].outcome == "passed"


def test_a_file_that_cannot_be_imported_is_a_failure_and_one_left_out_is_told(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    left_out = "import pytest\npytest.skip('no moon', allow_module_level=True)"
    pytester.makepyfile(test_broken="import no_such_module_of_ours", test_left_out=left_out)
    pytester.inline_run(plugins=[Recorder(tmp_path / "report.jsonl", frozenset(), "abc")])
    rows = {row.test: row for row in read_rows(tmp_path / "report.jsonl")}
    assert {test: row.outcome for test, row in rows.items()} == {
        "test_broken.py": "failed", "test_left_out.py": "skipped",
    }  # fmt: skip
    assert "no_such_module_of_ours" in rows["test_broken.py"].why
    assert "no moon" in rows["test_left_out.py"].why
    pytester.makepyfile(test_broken="def test_mended(): pass")
    pytester.inline_run(plugins=[Recorder(tmp_path / "report.jsonl", frozenset(), "def")])
    mended = {row.test: row.outcome for row in read_rows(tmp_path / "report.jsonl")}
    assert mended == {"test_broken.py::test_mended": "passed", "test_left_out.py": "skipped"}


def test_the_page_counts_and_names_what_failed() -> None:
    rows = [
        Row("tests/a/test_x.py::test_one[1]", "passed", 2.0, True, "", "abc"),
        Row("tests/a/test_x.py::test_one[2]", "failed", 1.0, True, "E  1 | 2", "abc"),
        Row("tests/b/test_y.py::test_two", "skipped", 0.0, False, "Skipped: no GPU", "def"),
    ]
    text = page(rows, "a machine")
    assert "**1 passed, 1 failed, 1 skipped** of 3." in text
    assert "| `tests/a` | 1 | 1 | 0 | 2 | 3 |" in text
    assert "| `tests/a/test_x.py::test_one[2]` | E 1 \\| 2 |" in text
    assert "| `tests/b/test_y.py::test_two` | 1 | no GPU |" in text
    assert "## Failed" not in page(rows[::2], "a machine")


@pytest.mark.parametrize("test", NAMED)
def test_what_is_named_as_exhaustive_exists(test: str) -> None:
    path, name = test.split("::")
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def test_the_committed_page_is_of_a_green_run() -> None:
    text = PAGE.read_text("utf-8")
    assert re.search(r"^\*\*[\d,]+ passed, 0 failed, \d+ skipped\*\* of [\d,]+\.$", text, re.MULTILINE)
    assert "## Failed" not in text
    for test in NAMED:
        (told,) = re.findall(rf"`{re.escape(test)}` \| (\d+) of (\d+) \|", text)
        assert told[0] == told[1] != "0", test

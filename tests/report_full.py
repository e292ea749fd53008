"""python -m tests.report_full: run every test this machine can run and write docs/test_full.md from what happened.

Appends one JSON object a test to --report as it ends; --resume goes on with those that have not passed yet, so the list
can be played in pieces (`python -m tests.report_full --resume tests/models`). Exit code 1 unless all that ran passed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch

from megatrain.optim import native

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/test_full.md"
SHOWN = 12  # of the longest tests
# Tests that promise to be exhaustive or long, and what they run through: a page without them is not the full list.
NAMED = {
    "tests/optim/test_split.py::test_every_pattern_round_trips": "all 2^32 fp32 patterns split and joined",
    "tests/engine/test_chaos.py::test_a_thousand_stories": "chaos, seeds 20 to 1,219",
    "tests/engine/test_chaos.py::test_any_story_ends_with_the_plain_loops_bits": "chaos, seeds 0 to 19",
    "tests/golden/test_golden.py::test_whole_runs_are_the_golden_ones": "golden runs, 200 steps each",
    "tests/models/test_families.py::test_gradients_are_whole_model_autograd": "gradients of every family",
    "tests/models/test_families_train.py::test_three_steps_are_the_references": "three steps of every family",
    "tests/checkpoint/test_checkpoint.py::test_ten_thousand_bit_flips_are_all_found_and_named": "10,000 bit flips",
    "tests/contracts/test_promises.py::test_a_killed_run_goes_on_as_if_it_never_was": "a run killed and resumed",
    "tests/demo/test_demo_model.py::test_twenty_steps_equal_the_plain_loop": "the demo's 135M model, 20 steps",
    "tests/optim/test_large.py::test_updates_beyond_two_to_the_31_elements": "an update of more than 2^31 elements",
}


@dataclass(frozen=True)
class Row:
    """What became of one test."""

    test: str
    outcome: str  # passed, failed, skipped
    seconds: float
    slow: bool
    why: str  # of a failure or a skip
    commit: str


@dataclass(eq=False)
class Recorder:
    """A plugin of pytest: leaves out what has passed, and writes a row as each test ends."""

    path: Path
    done: frozenset[str]
    commit: str
    _parts: dict[str, list[pytest.TestReport]] = field(default_factory=lambda: defaultdict(list))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects tests of an earlier piece."""
        known = [item for item in items if item.nodeid in self.done]
        config.hook.pytest_deselected(items=known)
        items[:] = [item for item in items if item.nodeid not in self.done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setup, call and teardown of a test, one after another."""
        self._parts[report.nodeid].append(report)
        if report.when == "teardown":
            self._write(self._parts.pop(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is a failure, one that leaves itself out a skip."""
        if report.failed or report.skipped:
            self._append(Row(report.nodeid, report.outcome, 0.0, False, _why(report), self.commit))

    def _write(self, parts: list[pytest.TestReport]) -> None:
        outcomes = {part.outcome for part in parts}
        outcome = "failed" if "failed" in outcomes else "skipped" if "skipped" in outcomes else "passed"
        why = "" if outcome == "passed" else _why(next(part for part in parts if part.outcome == outcome))
        seconds = round(sum(part.duration for part in parts), 3)
        self._append(Row(parts[0].nodeid, outcome, seconds, "slow" in parts[0].keywords, why, self.commit))

    def _append(self, row: Row) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason of a skip, the end of a failure."""
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-300:]


def read_rows(path: Path) -> list[Row]:
    """The last row of every test of a report, and of every file that could not be imported or left itself out."""
    found: dict[str, Row] = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        row = Row(**json.loads(line))
        if "::" in row.test:
            found.pop(row.test.split("::")[0], None)  # its file can be imported now
        found[row.test] = row
    return list(found.values())


def commit_of(root: Path) -> str:
    """The commit of the tree, with a "+" if files differ from it; "unknown" where there is no repository."""
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def machine() -> str:
    """The processor and, if there is one, the GPU."""
    text = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    gpu = (
        f", {torch.cuda.get_device_name()}"
        if torch.cuda.is_available()
        else ", no GPU: tests of one are not in this list"
    )
    return f"{os.cpu_count()} × {names[0] if names else platform.processor()}{gpu}"


def versions() -> str:
    """Of what the figures depend on."""
    packages = ("torch", "transformers", "numpy", "tokenizers", "safetensors", "pytest", "hypothesis")
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    kernels = "the C++ core" if native.load() is not None else "no C++ core"
    return ", ".join([f"Python {platform.python_version()}", *found, kernels, f"{platform.system()}"])


def page(rows: Sequence[Row], about: str) -> str:
    """docs/test_full.md."""
    counts, seconds = Counter(row.outcome for row in rows), sum(row.seconds for row in rows)
    slow = [row for row in rows if row.slow]
    commits = Counter(row.commit for row in rows)
    lines = [
        "# The full list, as it was run\n",
        "`make test-full` runs every test this machine can run, the slow ones included, and writes this page from what",
        "happened: nothing here is typed by hand. `build/test-full.jsonl` has a line for every test.\n",
        f"**{counts['passed']:,} passed, {counts['failed']} failed, {counts['skipped']} skipped** of {len(rows):,}.",
        f"Seconds of all: {seconds:,.0f}; of the {len(slow)} slow ones: {sum(row.seconds for row in slow):,.0f}.",
        "They are wall time, test after test, on a machine that may have had other work.\n",
        about,
        "Commits: " + ", ".join(f"`{commit}` ({count:,} tests)" for commit, count in commits.most_common()) + ".\n",
    ]
    lines += _table("Exhaustive and long", ("what", "test", "passed", "s"), _named(rows))
    lines += _table("By folder", ("folder", "passed", "failed", "skipped", "slow", "s"), _folders(rows))
    longest = sorted(rows, key=lambda row: -row.seconds)[:SHOWN]
    lines += _table("The longest", ("test", "s"), [(f"`{row.test}`", f"{row.seconds:.1f}") for row in longest])
    skips = Counter((row.test.split("[")[0], row.why) for row in rows if row.outcome == "skipped")
    cells = [(f"`{test}`", str(count), _cell(why)) for (test, why), count in sorted(skips.items())]
    lines += _table("Skipped, and why", ("test", "cases", "why"), cells)
    cells = [(f"`{row.test}`", _cell(row.why)) for row in rows if row.outcome == "failed"]
    lines += _table("Failed", ("test", "why"), cells) if cells else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _named(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    cells = []
    for test, what in NAMED.items():
        mine = [row for row in rows if row.test.split("[")[0] == test]
        passed = sum(row.outcome == "passed" for row in mine)
        cells.append((what, f"`{test}`", f"{passed} of {len(mine)}", f"{sum(row.seconds for row in mine):.0f}"))
    return cells


def _folders(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    cells = []
    for folder in sorted({str(Path(row.test.split("::")[0]).parent) for row in rows}):
        mine = [row for row in rows if str(Path(row.test.split("::")[0]).parent) == folder]
        counts = Counter(row.outcome for row in mine)
        numbers = (counts["passed"], counts["failed"], counts["skipped"], sum(row.slow for row in mine))
        cells.append((f"`{folder}`", *map(str, numbers), f"{sum(row.seconds for row in mine):.0f}"))
    return cells


def _table(head: str, names: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    rule = "|" + "---|" * len(names)
    return [f"## {head}", f"| {' | '.join(names)} |", rule, *(f"| {' | '.join(row)} |" for row in cells), ""]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split()).removeprefix("Skipped: ")[:200]


def main() -> int:
    """Run, record, write the page."""
    parser = argparse.ArgumentParser("python -m tests.report_full", description=__doc__.split("\n\n")[0])
    parser.add_argument("tests", nargs="*", help="folders, files or tests; all if none is given")
    parser.add_argument("--report", type=Path, default=ROOT / "build/test-full.jsonl", help="JSON lines, one a test")
    parser.add_argument("--resume", action="store_true", help="do not repeat tests that --report has as passed")
    parser.add_argument("--no-page", action="store_true", help="leave docs/test_full.md as it is: more pieces follow")
    args = parser.parse_args()
    # A shell starts what it puts into the background with Ctrl-C ignored: tests of it would fail for that alone.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    args.report.parent.mkdir(parents=True, exist_ok=True)
    if not args.resume:
        args.report.write_text("", "utf-8")
    done = frozenset(row.test for row in read_rows(args.report) if row.outcome == "passed")
    marks = "gpu or not gpu" if torch.cuda.is_available() else "not gpu"
    recorder = Recorder(args.report, done, commit_of(ROOT))
    code = pytest.main(["-q", "-m", marks, f"--rootdir={ROOT}", *args.tests], plugins=[recorder])
    if not args.no_page:
        PAGE.write_text(page(read_rows(args.report), f"Machine: {machine()}.\nVersions: {versions()}."), "utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 1


if __name__ == "__main__":
    sys.exit(main())

"""python -m tests.mutation: break the program in every way of the list, one at a time, and see the tests notice.

Works on a copy. A mutant is killed if its tests fail, and the same tests pass on the program as it is. Writes
docs/mutants.md. Exit code 1 if less than 98 % are killed, or if a mutant's text is no longer in its file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
NEEDED = 0.98
LIMIT_S = 600  # a mutant that hangs its tests is noticed too


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant."""

    mutant: Mutant
    killed: bool
    seconds: float
    by: str  # the first test that failed


def main() -> int:
    """Run the mutants asked for (all, or those whose file or text holds --only)."""
    parser = argparse.ArgumentParser("python -m tests.mutation", description=__doc__)
    parser.add_argument("--only", default="", help="only mutants whose file, name or text holds this")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if args.only in f"{m.file} {m.what} {m.old} {m.new}"]
    with tempfile.TemporaryDirectory(prefix="megatrain-mutants-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", ".demo", "build", "__pycache__", ".*")
        )
        stale = [m for m in chosen if (copy / m.file).read_text(encoding="utf-8").count(m.old) != 1]
        for mutant in stale:
            print(f"stale: {mutant.file}: {mutant.what}: its text is not there exactly once", flush=True)
        if stale:
            return 1
        for tests in sorted({m.tests for m in chosen}):
            failed = run(copy, tests)
            if failed is not None:
                print(f"tests fail without a mutant: {tests}: {failed}", flush=True)
                return 1
        verdicts = [judge(copy, mutant) for mutant in chosen]
    share = sum(v.killed for v in verdicts) / len(verdicts)
    print(f"{sum(v.killed for v in verdicts)} of {len(verdicts)} killed ({share:.1%})")
    if not args.only:
        (ROOT / "docs" / "mutants.md").write_text(report(verdicts), encoding="utf-8")
    return 0 if share >= NEEDED else 1


def run(copy: Path, tests: str) -> str | None:
    """None if `tests` pass in `copy`, else the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests.split()]
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}:{copy}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "hung"
    if done.returncode == 0:
        return None
    failures = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0].split(" ", 1)[1].split(" - ")[0] if failures else f"exit code {done.returncode}"


def judge(copy: Path, mutant: Mutant) -> Verdict:
    """Apply, test, restore."""
    path = copy / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    started = time.perf_counter()
    try:
        failed = run(copy, mutant.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    verdict = Verdict(mutant, failed is not None, time.perf_counter() - started, failed or "")
    print(
        f"{'killed  ' if verdict.killed else 'SURVIVED'} {verdict.seconds:5.0f} s  {mutant.file}: {mutant.what}",
        flush=True,
    )
    return verdict


def report(verdicts: list[Verdict]) -> str:
    """The committed page."""
    killed = sum(v.killed for v in verdicts)
    rows = "\n".join(
        f"| {'killed' if v.killed else '**survived**'} | `{v.mutant.file}` | {v.mutant.what} | `{v.by}` |"
        for v in verdicts
    )
    return (
        "# Mutants\n\nWritten by `make mutants`. Each line is a fault put into the program; the tests named by it in "
        f"`tests/mutation/mutants.py` had to fail.\n\n**{killed} of {len(verdicts)} killed.**\n\n"
        f"| | file | fault | first test that failed |\n|---|---|---|---|\n{rows}\n"
    )


if __name__ == "__main__":
    sys.exit(main())

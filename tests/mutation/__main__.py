"""python -m tests.mutation: break the program in every way of the list, one at a time, and see the tests notice.

Works on a copy. A mutant is killed if a test fails that passes on the program as it is: first its own few tests, then,
if they pass, everything in `tests.mutation.mutants.MORE` for its folder. Appends one JSON object a mutant to --report;
without --only, writes docs/mutants.md from it. Exit code 1 if less than 98 % are killed, if the text of a mutant is
not in its file exactly once, or if the tests fail without a mutant.

--device cuda: the mutants that only a GPU can show, each with its GPU test; some seconds a mutant.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation import worker
from tests.mutation.mutants import MUTANTS, Device, Mutant, more_tests, stale
from tests.mutation.page import page

ROOT = Path(__file__).resolve().parents[2]
NEEDED = 0.98
LIMIT_S = {"first": 400, "more": 1200}  # a mutant that hangs its tests is noticed too,
PATIENCE, LEAST_S = 6, 60  # and sooner: after so many times what the tests take without it
MARKS: dict[Device, str] = dict.fromkeys(("cpu", "core"), "not gpu and not slow") | {"cuda": "gpu and not slow"}


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant: a line of the report."""

    file: str
    fault: str
    device: Device
    killed: bool
    by: str  # the first test that failed
    why: str
    more: bool  # its own tests passed, a wider list did not
    seconds: float


def main() -> int:
    """Run the mutants asked for (all, or those whose file or text holds --only)."""
    parser = argparse.ArgumentParser("python -m tests.mutation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", help="only mutants whose file, fault or text holds this")
    parser.add_argument(
        "--device",
        choices=list(MARKS),
        default="cpu",
        help="which mutants: of the program on a CPU or a GPU, or of its C++ core",
    )
    parser.add_argument("--report", type=Path, default=Path("mutants.jsonl"), help="JSON lines, one a mutant")
    parser.add_argument("--resume", action="store_true", help="do not repeat those that --report has as killed")
    parser.add_argument("--quick", action="store_true", help="no wider list of tests for those that survive their own")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if m.device == args.device and args.only in f"{m.file} {m.fault} {m.old} {m.new}"]
    gone = stale(ROOT, chosen)
    print("\n".join(gone), end="\n" if gone else "")
    if gone or not chosen:
        return 1
    known = read_report(args.report) if args.resume else []
    done = {(v.file, v.fault) for v in known}
    verdicts = [v for v in known if (v.file, v.fault) in {(m.file, m.fault) for m in chosen}]
    chosen = [m for m in chosen if (m.file, m.fault) not in done]
    args.report.parent.mkdir(parents=True, exist_ok=True)
    args.report.write_text("".join(json.dumps(asdict(v)) + "\n" for v in verdicts), "utf-8")
    with tempfile.TemporaryDirectory(prefix="megatrain-mutants-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("build", "__pycache__", ".*"))
        worker.prepare(copy)
        for verdict in judge(copy, chosen, args.quick):
            verdicts.append(verdict)
            with args.report.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
            state = "killed  " if verdict.killed else "SURVIVED"
            print(f"{state} {verdict.seconds:5.1f} s  {verdict.file}: {verdict.fault}", flush=True)
    killed = sum(v.killed for v in verdicts)
    print(f"{killed} of {len(verdicts)} killed ({killed / len(verdicts):.1%})")
    if not args.only:
        place = {(mutant.file, mutant.fault): number for number, mutant in enumerate(MUTANTS)}
        rows = [asdict(verdict) for verdict in sorted(verdicts, key=lambda v: place[v.file, v.fault])]
        (ROOT / "docs/mutants.md").write_text(page(rows, ROOT / "docs/mutants.md"), "utf-8")
    return 0 if killed >= NEEDED * len(verdicts) else 1


def read_report(path: Path) -> list[Verdict]:
    """The killed mutants of a report."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    return [Verdict(**row) for row in rows if row["killed"]]


def judge(copy: Path, chosen: list[Mutant], quick: bool) -> Iterator[Verdict]:
    """Apply, test, restore, for each. A mutant whose tests fail without it is not killed by them."""
    clean: dict[str, worker.Outcome] = {}
    for mutant in chosen:
        marks = MARKS[mutant.device]
        if mutant.tests not in clean:
            clean[mutant.tests] = worker.run(copy, mutant.tests, LIMIT_S["first"], marks)
        before = clean[mutant.tests]
        if before.failed:
            why = f"fails without the mutant: {before.failed}: {before.why}"
            print(f"{mutant.tests}: {why}", flush=True)
            yield Verdict(mutant.file, mutant.fault, mutant.device, False, "", why[:200], False, before.seconds)
            continue
        path = copy / mutant.file
        text = path.read_text("utf-8")
        path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        refused = worker.build_core(copy) if mutant.device == "core" else ""
        if refused:
            raise RuntimeError(f"{mutant.file}: {mutant.fault}: does not compile: {refused}")
        outcome, wider = worker.run(copy, mutant.tests, max(LEAST_S, PATIENCE * before.seconds), marks), False
        seconds = outcome.seconds
        if not outcome.failed and mutant.device == "cpu" and not quick:
            outcome, wider = worker.run(copy, more_tests(mutant.file), LIMIT_S["more"], marks), True
            seconds += outcome.seconds
        path.write_text(text, "utf-8")
        if mutant.device == "core":
            worker.copy_core(copy)
        yield Verdict(
            mutant.file, mutant.fault, mutant.device, bool(outcome.failed), outcome.failed, outcome.why[:200],
            wider and bool(outcome.failed), round(seconds, 1),
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

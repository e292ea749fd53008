"""python -m tests.gpu: run every test that needs a GPU on one machine in a few minutes, and sum each part up in a line.

Parts run beside one another, each a pytest of its own with a log and a time limit; what measures the machine, or fills
it, comes after them, one at a time. Exit code 1 if anything failed, was cut off, or found no test to run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatrain.hardware.cgroups import usable_cores

ROOT = Path(__file__).resolve().parents[2]
NAMED = ("identity", "kept_attention", "random_plans")  # files of tests/gpu that are parts of their own
LOOK_S = 0.1  # between two looks at the parts


@dataclass(frozen=True)
class Part:
    """Every `of`-th test of `paths`, from `index` on."""

    name: str
    paths: tuple[str, ...]
    index: int = 0
    of: int = 1


@dataclass(eq=False)
class Split:
    """A plugin of pytest: of the tests that the marks leave, every `of`-th one from `index` on."""

    index: int
    of: int

    @pytest.hookimpl(trylast=True)  # after the marks have chosen
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects what other parts run."""
        mine = items[self.index :: self.of]
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % self.of != self.index])
        items[:] = mine


@dataclass(eq=False)
class Run:
    """A part under way: its process leads a group of its own, which ends with it."""

    part: Part
    log: Path
    process: subprocess.Popen[bytes]
    started_s: float = field(default_factory=time.perf_counter)
    cut_off: bool = False

    def stop(self) -> None:
        """Ends the process and all that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def summary(self) -> tuple[bool, str]:
        """Whether all is well, and the part in a line."""
        text = self.log.read_text("utf-8", "replace")
        seconds = time.perf_counter() - self.started_s
        outcomes = {"passed": "passed", "failed": "failed|errors?", "skipped": "skipped"}
        counts = ", ".join(f"{_count(text, outcomes[name])} {name}" for name in outcomes)
        code = self.process.returncode
        good = code == 0 and not self.cut_off
        why = "" if good else "cut off" if self.cut_off else {5: "no test found"}.get(code, f"exit code {code}")
        error = re.search(r"^E +(.*)", text, re.MULTILINE)
        tail = [*filter(None, (why, "" if good or error is None else error[1].strip()))]
        line = f"{'ok  ' if good else 'FAIL'} {self.part.name:<18} {counts}, {seconds:.0f} s"
        return good, ": ".join([line, *tail])


def _count(text: str, outcome: str) -> int:
    """By pytest's last line; of a part that was cut off, the tests that had ended."""
    last = re.findall(r"^=+ (.* in [\d.]+s.*) =+$", text, re.MULTILINE)
    if last:
        return sum(map(int, re.findall(rf"(\d+) (?:{outcome})\b", last[-1])))
    return len(re.findall(rf"^\S*::.* (?:{outcome.upper()})\b", text, re.MULTILINE))


def split(name: str, paths: Sequence[str], of: int) -> list[Part]:
    """The tests of `paths` as `of` parts."""
    return [Part(f"{name}-{i}" if of > 1 else name, tuple(paths), i, of) for i in range(of)]


def listed() -> tuple[list[Part], list[Part]]:
    """(Parts that run beside one another, parts that run alone.)"""
    identity, kept, random = (f"tests/gpu/test_{name}_gpu.py" for name in NAMED)
    here = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py"))
    rest = [path for path in here if path not in (identity, kept, random)]
    losses = [f"tests/models/test_{name}_gpu.py" for name in ("training_noise", "cross_entropy")]
    beside = [
        *split("parity", ["tests/models/test_parity_gpu.py"], 3),
        *split("identity", [identity], 2),
        *split("kept", [kept], 2),
        *split("attention", ["tests/models/test_attention_triton.py"], 4),
        *split("random", [random], 1),
        *split("losses", losses, 1),
        *split("rest", [*rest, "tests/kernels"], 1),
        *split("golden", ["tests/golden"], 1),
    ]
    alone = [
        *split("demo", ["tests/demo/test_demo_model.py"], 1),
        *split("complaints", ["tests/complaints/test_machine.py"], 1),
        *split("hardware", ["tests/hardware/test_gpu.py"], 1),
    ]
    return beside, alone


def start(part: Part, logs: Path, marks: str, threads: int) -> Run:
    """The part, begun."""
    log = logs / f"{part.name}.log"
    command = [sys.executable, "-m", "tests.gpu", "--part", f"{part.index}/{part.of}", "--marks", marks, *part.paths]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Run(part, log, process)


def play(parts: Sequence[Part], logs: Path, limit_s: float, marks: str = "gpu", threads: int = 1) -> bool:
    """Runs all parts at one time and prints a line as each ends; whether all were well."""
    good, running = True, [start(part, logs, marks, threads) for part in parts]
    try:
        while running:
            for run in list(running):
                run.cut_off = run.process.poll() is None and time.perf_counter() - run.started_s > limit_s
                if run.cut_off:
                    run.stop()
                if run.process.returncode is not None:
                    running.remove(run)
                    well, line = run.summary()
                    good = good and well
                    print(line, flush=True)
            time.sleep(LOOK_S)
    finally:
        for run in running:
            run.stop()
    return good


def run_part(part: str, marks: str, paths: Sequence[str]) -> int:
    """The process of a part: pytest, with the tests that are its own."""
    # A shell starts what it puts into the background with Ctrl-C ignored: tests of it would fail for that alone.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    index, of = map(int, part.split("/"))
    words = ["-v", "-m", marks, "-p", "no:cacheprovider", f"-c{ROOT / 'pyproject.toml'}", *paths]
    return int(pytest.main(words, plugins=[Split(index, of)]))


def main() -> int:
    """All parts, or those of --only."""
    parser = argparse.ArgumentParser("python -m tests.gpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", help="parts by name, with commas between; parity means parity-0, parity-1 …")
    parser.add_argument("--logs", type=Path, default=ROOT / "build/gpu", help="a folder; one log a part")
    parser.add_argument("--limit-s", type=float, default=300.0, help="for each part")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of the processes that this one starts
    parser.add_argument("--marks", default="gpu", help=argparse.SUPPRESS)
    parser.add_argument("paths", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return run_part(args.part, args.marks, args.paths)
    beside, alone = listed()
    if args.only is not None:
        wanted = set(args.only.split(","))
        known = {name for part in (*beside, *alone) for name in _names(part)}
        if not wanted <= known:
            unknown, names = ", ".join(sorted(wanted - known)), ", ".join(sorted(known))
            parser.error(f"--only: there is no part {unknown}; there are {names}")
        beside, alone = ([part for part in parts if wanted & _names(part)] for parts in (beside, alone))
    args.logs.mkdir(parents=True, exist_ok=True)
    good = play(beside, args.logs, args.limit_s, threads=max(1, usable_cores() // max(1, len(beside))))
    for part in alone:
        good = play([part], args.logs, args.limit_s, threads=usable_cores()) and good
    return 0 if good else 1


def _names(part: Part) -> set[str]:
    return {part.name, part.name.rpartition("-")[0] or part.name}


if __name__ == "__main__":
    sys.exit(main())

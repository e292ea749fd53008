"""Runs tests in a process of its own: forked from one that has already imported what is slow and never changes.

Each run starts with no module of ours imported, so it sees the copy as it is on disk.
"""

from __future__ import annotations

import importlib.util
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

# Seconds to import each; none of them is ours, none touches a GPU when imported.
PRELOADED = [
    "numpy", "torch", "torch.func", "transformers", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama", "transformers.models.gemma3.modeling_gemma3", "pydantic", "pytest",
    "_pytest.assertion.rewrite", "_pytest.terminal", "hypothesis", "safetensors.torch", "tokenizers", "jinja2", "yaml",
]  # fmt: skip
SETTINGS = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class Outcome:
    """What a run of tests gave. `failed`: the first test that did, "" if all passed. `why`: its last line."""

    failed: str
    why: str
    seconds: float


class _FirstFailure:
    """A plugin of pytest: remembers the first failure, counts what ran."""

    def __init__(self) -> None:
        self.failed, self.why, self.num_run = "", "", 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_run += report.when == "call" and not report.skipped
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            self.why = lines[0].removeprefix("E").strip() if lines else "no message"


def is_tree(path: str) -> bool:
    """Whether this entry of a module path leads to some copy of the program, and to nothing else that is needed."""
    if Path(path).name in ("site-packages", "dist-packages"):
        return False  # an installed program lies among the libraries; the copy comes before it
    return (Path(path) / "megatrain/__init__.py").exists() or (Path(path) / "tests/mutation").exists()


def copy_core(copy: Path) -> None:
    """Give `copy` the C++ core that is installed, if one is."""
    package = importlib.util.find_spec("megatrain")
    native = None if package is None else importlib.util.find_spec("megatrain._native")
    if native is not None and native.origin is not None:
        shutil.copy(native.origin, copy / "src/megatrain")


def prepare(copy: Path) -> None:
    """Make every later run, and what it starts, import from `copy`. Call once, before the first run."""
    copy_core(copy)
    shim = Path(__file__).parents[1] / "only_this_tree"
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and not is_tree(path)]
    os.environ |= SETTINGS | {"PYTHONPATH": os.pathsep.join([str(shim), str(copy / "src"), str(copy), *others])}
    multiprocessing.set_start_method("forkserver")
    multiprocessing.set_forkserver_preload(PRELOADED)


def build_core(copy: Path) -> str:
    """Build the C++ core of `copy` and put it where `copy` imports it from; what the compiler says if it refuses."""
    target = copy / "build/core"
    words = ["install", "--quiet", "--no-deps", "--upgrade", "--target", str(target), "."]
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    for path in target.glob("megatrain/_native*.so"):
        shutil.copy(path, copy / "src/megatrain")
    shutil.rmtree(target, ignore_errors=True)
    return done.stderr[-300:] if done.returncode else ""


def run(copy: Path, tests: str, limit_s: float, marks: str) -> Outcome:
    """The outcome of `tests` (arguments of pytest) in `copy`, stopped at the first failure or at `limit_s`."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    started = time.perf_counter()
    process = multiprocessing.Process(target=_child, args=(theirs, copy, tests, marks))
    process.start()
    theirs.close()
    try:
        failed, why = ours.recv() if ours.poll(limit_s) else ("(hung)", f"no result after {limit_s:.0f} s")
    except EOFError:
        failed, why = "(died)", "the process ended without a result"
    if process.is_alive():
        process.join(1)  # a result was sent: what is left is the way out
    if process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return Outcome(failed, why, time.perf_counter() - started)


def _import_from(copy: Path) -> None:
    """Whatever is imported from now on comes from `copy`: the parent's path, and modules of its tree, came along."""
    sys.path[:] = [str(copy / "src"), str(copy), *(path for path in sys.path if path and not is_tree(path))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "megatrain")]:
        del sys.modules[name]


def _child(result: Connection, copy: Path, tests: str, marks: str) -> None:
    os.setpgrp()  # what the tests start dies with them
    os.chdir(copy)
    _import_from(copy)
    plugin = _FirstFailure()
    with tempfile.TemporaryDirectory(prefix="megatrain-mutant-") as scratch:
        words = ["-x", "-q", "-m", marks, "-p", "no:cacheprovider", "--timeout=0", f"--basetemp={scratch}/tests"]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what the parent has imported
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            code = pytest.main([*words, *tests.split()], plugins=[plugin])
    import megatrain  # noqa: PLC0415 - only now, and in this process alone: it must be the copy

    if not Path(megatrain.__file__).is_relative_to(copy):
        plugin.failed, plugin.why = "(wrong tree)", f"tests imported {megatrain.__file__}, not the copy"
    elif code and not plugin.failed:
        plugin.failed, plugin.why = f"(exit code {int(code)})", "no test failed"
    elif not code and plugin.num_run == 0:
        plugin.failed, plugin.why = "(no test)", f"nothing ran for {tests}"
    result.send((plugin.failed, plugin.why))

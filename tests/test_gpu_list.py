"""python -m tests.gpu, without a GPU: parts of small made-up files, and that no GPU test is left out of the list."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gpu.__main__ import ROOT, Part, listed, play, split

PASSES = "import pytest\n\n@pytest.mark.parametrize('i', range(7))\ndef test_it(i):\n    print('ran', i)\n"


def lines_of(parts: list[Part], tmp_path: Path, capsys: pytest.CaptureFixture[str], limit_s: float = 60.0):
    """(Whether all were well, the lines by part.)"""
    good = play(parts, tmp_path, limit_s, marks="not gpu")
    return good, {line.split()[1]: line for line in capsys.readouterr().out.splitlines()}


def write(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_every_test_runs_in_exactly_one_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    marked = "import pytest\n\n@pytest.mark.gpu\ndef test_of_a_gpu(): raise RuntimeError\n\n"
    good, lines = lines_of(split("it", [write(tmp_path, "test_a.py", marked + PASSES)], 3), tmp_path, capsys)
    assert good
    ran = [
        sorted(map(int, re.findall(r"test_it\[(\d)\] PASSED", (tmp_path / f"it-{i}.log").read_text())))
        for i in range(3)
    ]
    assert ran == [[0, 3, 6], [1, 4], [2, 5]]
    assert [re.sub(r"\d+ s$", "N s", line) for _, line in sorted(lines.items())] == [
        f"ok   it-{i}               {n} passed, 0 failed, 0 skipped, N s" for i, n in enumerate((3, 2, 2))
    ]


def test_what_is_not_well_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails = "def test_a(): assert 1 == 2\n\ndef test_b(): pass\n\ndef test_c():\n    import pytest\n    pytest.skip()\n"
    parts = [
        Part("fails", (write(tmp_path, "test_fails.py", fails),)),
        Part("broken", (write(tmp_path, "test_broken.py", "import no_such_module\n"),)),
        Part("empty", (write(tmp_path, "test_empty.py", "def test_x(): pass\n"),), 1, 2),
        Part("fine", (write(tmp_path, "test_fine.py", f"{PASSES}    import time; time.sleep(0.4)\n"),)),  # ends last
    ]
    good, lines = lines_of(parts, tmp_path, capsys)
    assert not good
    assert re.search(r"^FAIL fails +1 passed, 1 failed, 1 skipped, \d+ s: exit code 1: assert 1 == 2$", lines["fails"])
    assert re.search(r"^FAIL broken +0 passed, 1 failed, .*: exit code 2: ModuleNotFoundError", lines["broken"])
    assert re.search(r"^FAIL empty +0 passed, 0 failed, 0 skipped, \d+ s: no test found$", lines["empty"])
    assert re.search(r"^ok   fine +7 passed", lines["fine"])


def test_a_part_that_hangs_is_cut_off_with_all_it_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = f"""import subprocess, time
def test_first(): pass
def test_hangs():
    sleeper = subprocess.Popen(["sleep", "300"])
    open({str(tmp_path / "pid")!r}, "w").write(str(sleeper.pid))
    time.sleep(300)
"""
    good, lines = lines_of([Part("hangs", (write(tmp_path, "test_hangs.py", hangs),))], tmp_path, capsys, limit_s=8.0)
    assert not good
    assert re.search(r"^FAIL hangs +1 passed, 0 failed, 0 skipped, \d+ s: cut off$", lines["hangs"])
    status = Path("/proc") / (tmp_path / "pid").read_text() / "status"
    deadline = time.monotonic() + 10
    while status.exists() and "State:\tZ" not in status.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_every_gpu_test_is_in_the_list() -> None:
    beside, alone = listed()
    paths = {ROOT / path for part in (*beside, *alone) for path in part.paths}
    assert all(path.exists() for path in paths)
    marked = [p for p in ROOT.glob("tests/**/test_*.py") if re.search(r"mark\.gpu\b", p.read_text("utf-8"))]
    assert len(marked) > 12
    forgotten = [path for path in marked if path != Path(__file__) and not paths & {path, *path.parents}]
    assert forgotten == []
    names = [part.name for part in (*beside, *alone)]
    assert len(set(names)) == len(names)
    assert {part.name: (part.index, part.of) for part in beside}["attention-3"] == (3, 4)


def test_a_part_that_is_not_there_is_refused(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.gpu", "--only", "parity,parrot", "--logs", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 2
    assert "there is no part parrot; there are attention" in done.stderr

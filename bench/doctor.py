"""python -m bench doctor: seconds that `megatrain doctor` takes, and what it finds.

Its figures are kept as ever, so `python -m bench plans` behind it plans with them. One JSON line is appended to
bench/results/<machine>.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.results import RESULTS, record
from bench.step import machine_name

LIMIT_S = 60.0


def examined(folder: Path) -> tuple[float, dict[str, object]]:
    """(Seconds that it took, its JSON). `folder`: on the disk to measure."""
    command = [sys.executable, "-m", "megatrain", "doctor", str(folder), "--json"]
    began = time.perf_counter()
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return time.perf_counter() - began, json.loads(ran.stdout)


def main(argv: Sequence[str]) -> int:
    """Time it, and record the line. 1 if it took a minute or more."""
    parser = argparse.ArgumentParser("python -m bench doctor", description=__doc__)
    parser.add_argument("--scratch", type=Path, default=Path.cwd(), help="folder on the disk to measure")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    took_s, found = examined(args.scratch)
    on = machine_name(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    record("doctor", {"wall_s": took_s, **found}, on=on, folder=args.results)
    print(f"{took_s:.1f} s, verdict {found['verdict']}")
    return int(took_s >= LIMIT_S)

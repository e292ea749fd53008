"""`python -m bench NAME ...`: run the benchmark in bench/NAME.py; without a name, list them."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

PARTS = {
    "placement",
    "plan_again",
    "plan_run",
    "plan_settings",
    "presets",
    "results",
    "timing",
    "trainer_figure",
    "baseline",
}
NOT_BENCHMARKS = {"__main__", *PARTS}


def names() -> list[str]:
    found = {module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])}
    return sorted(found - NOT_BENCHMARKS)


def main(argv: list[str]) -> int:
    """Hand the remaining arguments to `main(argv) -> int` of the named module."""
    if not argv or argv[0] not in names():
        print(f"usage: python -m bench NAME ...   (NAME: {', '.join(names())})", file=sys.stderr)
        return 2
    return importlib.import_module(f"bench.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

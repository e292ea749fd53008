"""Seeds that are to be played again."""

from __future__ import annotations

import os


def seeds_asked(variable: str) -> range:
    """Those that an environment variable names: "417", or "400-499"; none without it."""
    first, _, last = os.environ.get(variable, "").partition("-")
    return range(int(first), int(last or first) + 1) if first else range(0)

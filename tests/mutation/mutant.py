"""What a mutant is."""

from __future__ import annotations

from typing import Literal, NamedTuple

Device = Literal["cpu", "cuda", "core"]  # core: on a CPU too, after building the C++ core anew


class Mutant(NamedTuple):
    """One fault, in words. `old` stands exactly once in `file`; `new` takes its place; `tests` must then fail."""

    file: str
    fault: str
    old: str
    new: str
    tests: str  # arguments of pytest, few and fast
    device: Device = "cpu"


def of(file: str, tests: str, *faults: tuple[str, str, str], device: Device = "cpu") -> list[Mutant]:
    """Faults (what, old, new) of one file that the same tests kill."""
    folder = "" if device == "core" else "src/megatrain/"
    return [Mutant(f"{folder}{file}", what, old, new, tests, device) for what, old, new in faults]

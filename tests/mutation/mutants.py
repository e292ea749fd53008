"""The whole list of faults, and what it must keep true of itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.mutation import (
    faults_average,
    faults_core,
    faults_data,
    faults_dice,
    faults_disk,
    faults_engine,
    faults_gpu,
    faults_models,
    faults_optim,
    faults_schedule,
)
from tests.mutation.mutant import Device, Mutant

__all__ = ["MUTANTS", "Device", "Mutant", "more_tests", "stale"]

MUTANTS: tuple[Mutant, ...] = tuple(
    mutant
    for faults in (
        faults_schedule,
        faults_engine,
        faults_optim,
        faults_models,
        faults_data,
        faults_dice,
        faults_disk,
        faults_gpu,
        faults_core,
        faults_average,
    )
    for mutant in faults.MUTANTS
)


def more_tests(file: str) -> str:
    """For a mutant that its own tests let live: every fast test of its room, and of whole steps."""
    parts = Path(file).parts
    room = parts[2] if parts[0] == "src" else "optim"
    return f"tests/{room} tests/engine tests/contracts"


def stale(root: Path, mutants: Sequence[Mutant]) -> list[str]:
    """A line for each mutant that no longer fits the program under `root`: its text must be there exactly once."""
    lines = []
    for mutant in mutants:
        path = root / mutant.file
        count = path.read_text("utf-8").count(mutant.old) if path.exists() else 0
        if count != 1:
            lines.append(
                f"stale mutant: {mutant.file}: {mutant.fault!r}: its text is there {count} times, not once; "
                "write it anew in tests/mutation/faults_*.py so that it makes the same fault in the new code"
            )
    return lines

"""docs/mutants.md from the verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HEADS = {
    "cpu": "On a CPU (`make mutants`)",
    "core": "In the C++ core (`python -m tests.mutation --device core`)",
    "cuda": "On a GPU (`python -m tests.mutation --device cuda`)",
}
INTRODUCTION = """# Mutants

A test proves something only if it can fail. So faults are put into the program, one at a time, and the tests must
notice: a wait dropped, a slot exchanged, a tensor skipped, betas swapped, a label off by one. The list is
`tests/mutation/mutants.py` and the files beside it; `tests/mutation/test_list.py` holds it to the program's text.
Each mutant first meets the few tests that should kill it; "wider" marks those that only a longer list killed.
This page is written by the runs themselves.
"""


def page(rows: Sequence[Mapping[str, Any]], path: Path) -> str:
    """The page with the part of the rows' device written anew and the other part as it stands in `path`."""
    kept = dict(_parts(path.read_text("utf-8"))) if path.exists() else {}
    device = rows[0]["device"]
    parts = kept | {HEADS[device]: _part(rows)}
    return INTRODUCTION + "".join(f"\n## {head}\n{parts[head]}" for head in HEADS.values() if head in parts)


def _parts(text: str) -> list[tuple[str, str]]:
    """(heading, what is below it)"""
    return [(part.split("\n", 1)[0], part.split("\n", 1)[1].rstrip("\n") + "\n") for part in text.split("\n## ")[1:]]


def _part(rows: Sequence[Mapping[str, Any]]) -> str:
    killed = sum(row["killed"] for row in rows)
    seconds = sorted(row["seconds"] for row in rows)
    lines = [
        f"\n**{killed} of {len(rows)} killed**, in {seconds[len(rows) // 2]:.1f} s at the median.\n",
        "| file | fault | killed by | s |",
        "|---|---|---|---|",
    ]
    for row in rows:
        wider = "wider: " if row["more"] else ""
        by = f"{wider}`{row['by']}`".replace("|", "\\|") if row["killed"] else "**survived**"
        lines.append(f"| `{row['file'].removeprefix('src/megatrain/')}` | {row['fault']} | {by} | {row['seconds']} |")
    return "\n".join(lines) + "\n"

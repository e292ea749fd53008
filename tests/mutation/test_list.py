"""The list of faults fits the program: a mutant whose text is gone would test nothing, in silence."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.mutants import MUTANTS, stale

ROOT = Path(__file__).parents[2]


def test_every_mutant_changes_the_program_at_one_place() -> None:
    gone = stale(ROOT, MUTANTS)
    assert not gone, "\n" + "\n".join(gone)
    assert len(MUTANTS) >= 70
    assert len({(m.file, m.old, m.new, m.device) for m in MUTANTS}) == len(MUTANTS)
    assert not [m.fault for m in MUTANTS if m.old == m.new]


def test_the_tests_that_mutants_name_exist() -> None:
    named = {word for mutant in MUTANTS for word in mutant.tests.split() if word.startswith("tests/")}
    assert not [path for path in named if not (ROOT / path.split("::")[0]).exists()]


def test_a_stale_mutant_is_told_with_its_remedy(tmp_path: Path) -> None:
    mutant = MUTANTS[0]
    path = tmp_path / mutant.file
    path.parent.mkdir(parents=True)
    for text, count in ((mutant.old * 2, 2), ("", 0)):
        path.write_text(text)
        (line,) = stale(tmp_path, [mutant])
        assert f"there {count} times" in line
        assert "write it anew" in line
    path.write_text(f"x{mutant.old}y")
    assert stale(tmp_path, [mutant]) == []

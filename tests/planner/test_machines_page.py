"""docs/machines.md is what the planner says."""

from __future__ import annotations

import pytest

from bench import machines

PAGE = machines.PAGE.read_text("utf-8")


def test_one_row_of_the_page_is_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MODELS", ("llama-3-8b",))
    header, rule, row = machines.rows()
    assert f"{header}\n{rule}\n" in PAGE, "run: python -m bench machines --write"
    assert f"{row}\n" in PAGE, "run: python -m bench machines --write"


@pytest.mark.slow
def test_the_page_is_fresh() -> None:
    table = "\n".join(machines.rows()) + "\n"
    assert table in PAGE, "run: python -m bench machines --write"
    assert machines.page_with(table) == PAGE


def test_more_memory_never_needs_more_ram() -> None:
    spec = machines.spec_of("qwen2.5-7b")
    needs = [machines.best_fit(spec, size) for size in (24, 48, 80)]
    totals = [found.ram_bytes for found in needs if found is not None]
    assert len(totals) == 3
    assert all(found.least_ram_bytes < found.ram_bytes / 2 for found in needs[:2] if found is not None)
    assert totals == sorted(totals, reverse=True)
    assert machines.best_fit(spec, 1) is None
    assert machines.cell(None) == "–"

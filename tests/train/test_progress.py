"""What a person sees while a run goes on: the table on a terminal, one line elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from megatrain.train.progress import Now, PlainDisplay, TableDisplay, table

NOW = Now(
    step=7,
    loss=1.25,
    grad_norm=0.5,
    learning_rate=2e-5,
    tokens_per_s=12345.6,
    step_s=1.5,
    mfu=0.413,
    lanes_s={"compute": 1.2, "h2d": 0.9, "disk": 0.0},
    peak_bytes={"hbm": 40 << 30, "ram": 300 << 30, "disk": 0},
    eta_s=93784,
)


def text_of(item: object) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(item)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_shows_figures_lanes_and_memory() -> None:
    shown = text_of(table(NOW))
    for part in (
        "1.2500",
        "0.500",
        "2.00e-05",
        "12,346",
        "41.3%",
        "1.50",
        "compute 1.20 h2d 0.90",
        "hbm 40.0  ram 300.0",
    ):
        assert part in shown
    assert "disk" not in shown, "a lane that did nothing, a tier that holds nothing"


def test_the_line_says_the_same() -> None:
    assert NOW.line() == (
        "step 7  loss 1.2500  grad_norm 0.500  lr 2.00e-05  12,346 tok/s  mfu 41.3%  1.50 s/step  "
        "[compute 1.20 h2d 0.90]  GiB: hbm 40.0 ram 300.0  eta 1 d 2:03:04"
    )


def test_a_terminal_gets_a_table_and_a_bar_below_its_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140)
    screen = TableDisplay(console, 6, 10)
    screen.line("saved step 6 [/not markup]")
    screen.live(NOW)
    screen.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "saved step 6 [/not markup]" in shown
    assert "7/10" in shown
    assert "eta 1 d 2:03:04" in shown
    assert "compute 1.20" in shown


def test_elsewhere_lines_only(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainDisplay()
    screen.line("a line")
    screen.live(NOW)
    screen.close()
    assert capsys.readouterr().out == "a line\n"

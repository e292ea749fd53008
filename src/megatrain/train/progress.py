"""The terminal's part of a run: a table of now and a progress bar on a TTY, plain lines anywhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from megatrain.planner.table import clock

GIB = 2**30


@dataclass(frozen=True)
class Now:
    """What is true after `step` steps. `mfu` None: the machine's peak was not measured."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float  # real tokens: padding does not count
    step_s: float
    mfu: float | None
    lanes_s: Mapping[str, float]  # busy seconds of the step
    peak_bytes: Mapping[str, int]  # by tier; disk: written so far
    eta_s: float

    @property
    def mfu_text(self) -> str:
        """ "41.3 %", or "–" where it is not known."""
        return "–" if self.mfu is None else f"{self.mfu:.1%}"

    def line(self) -> str:
        """All of it on one line."""
        memory = " ".join(f"{tier} {num_bytes / GIB:.1f}" for tier, num_bytes in self.peak_bytes.items() if num_bytes)
        return (
            f"step {self.step}  loss {self.loss:.4f}  grad_norm {self.grad_norm:.3f}  lr {self.learning_rate:.2e}  "
            f"{self.tokens_per_s:,.0f} tok/s  mfu {self.mfu_text}  {self.step_s:.2f} s/step  "
            f"[{lanes_text(self.lanes_s)}]  GiB: {memory}  eta {clock(self.eta_s)}"
        )


class Display(Protocol):
    """Where lines and progress are shown."""

    def line(self, text: str) -> None:
        """One line that stays."""
        ...

    def live(self, now: Now) -> None:
        """What is true now; may be overwritten."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class PlainDisplay:
    """Lines only: for files and pipes."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def live(self, now: Now) -> None:
        """Nothing to overwrite here; the step's own line is enough."""

    def close(self) -> None:
        """Nothing to leave."""


class TableDisplay:
    """A table of the newest step and a progress bar below the lines, from the first step on."""

    def __init__(self, console: Console, start_step: int, num_steps: int) -> None:
        self._console = console
        columns = (BarColumn(bar_width=40), MofNCompleteColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=num_steps, completed=start_step)
        self._live = Live(console=console, auto_refresh=False)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def live(self, now: Now) -> None:
        self._progress.update(self._task, completed=now.step, description=f"eta {clock(now.eta_s)}")
        self._live.start()
        self._live.update(Group(table(now), self._progress), refresh=True)

    def close(self) -> None:
        self._live.stop()


class LastingDisplay:
    """`shown`, whose end is not the end of the run.

    A closed pipe (Ctrl-C ends `| tee` too), a lost terminal or a full disk behind a redirection costs the lines on the
    screen, which log.txt has as well, and no step and no save.
    """

    def __init__(self, shown: Display) -> None:
        self._shown = shown

    def line(self, text: str) -> None:
        with _to_nowhere_once_unread():
            self._shown.line(text)

    def live(self, now: Now) -> None:
        with _to_nowhere_once_unread():
            self._shown.live(now)

    def close(self) -> None:
        with _to_nowhere_once_unread():
            self._shown.close()


@contextmanager
def _to_nowhere_once_unread() -> Iterator[None]:
    """Standard output that cannot be written leads to the null device from then on, its rest in the buffer too."""
    try:
        yield
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def table(now: Now) -> Table:
    """Figures, busy seconds by lane and memory by tier, side by side."""
    shown = Table(show_header=True, box=None, padding=(0, 2))
    for title in ("loss", "grad norm", "lr", "tok/s", "MFU", "s/step"):
        shown.add_column(title, justify="right")
    shown.add_column("lanes, s")
    shown.add_column("memory, GiB")
    memory = "  ".join(f"{tier} {num_bytes / GIB:.1f}" for tier, num_bytes in now.peak_bytes.items() if num_bytes)
    shown.add_row(
        f"{now.loss:.4f}",
        f"{now.grad_norm:.3f}",
        f"{now.learning_rate:.2e}",
        f"{now.tokens_per_s:,.0f}",
        now.mfu_text,
        f"{now.step_s:.2f}",
        lanes_text(now.lanes_s),
        memory,
    )
    return shown


def lanes_text(lanes_s: Mapping[str, float]) -> str:
    """Busy seconds of the lanes that did something: "compute 1.20 host 0.31"."""
    return " ".join(f"{lane} {seconds:.2f}" for lane, seconds in lanes_s.items() if seconds >= 0.005)


def display(start_step: int, num_steps: int) -> Display:
    """A table and a bar if standard output is a terminal, plain lines otherwise."""
    console = Console()
    return LastingDisplay(TableDisplay(console, start_step, num_steps) if console.is_terminal else PlainDisplay())

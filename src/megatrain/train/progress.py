"""The terminal's part of a run: a bar with a live line on a TTY, plain lines anywhere else."""

from __future__ import annotations

from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Display(Protocol):
    """Where lines and progress are shown."""

    def line(self, text: str) -> None:
        """One line that stays."""
        ...

    def live(self, step: int, text: str) -> None:
        """What is true now, after `step` steps; may be overwritten."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


class PlainDisplay:
    """Lines only: for files and pipes."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def live(self, step: int, text: str) -> None:
        """Nothing to overwrite here; the step's own line is enough."""

    def close(self) -> None:
        """Nothing to leave."""


class BarDisplay:
    """A progress bar below the lines, from the first live line on."""

    def __init__(self, console: Console, start_step: int, num_steps: int) -> None:
        columns = (
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("starting", total=num_steps, completed=start_step)

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def live(self, step: int, text: str) -> None:
        self._progress.start()
        self._progress.update(self._task, completed=step, description=text)

    def close(self) -> None:
        self._progress.stop()


def display(start_step: int, num_steps: int) -> Display:
    """A bar if standard output is a terminal, plain lines otherwise."""
    console = Console()
    return BarDisplay(console, start_step, num_steps) if console.is_terminal else PlainDisplay()

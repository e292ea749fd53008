"""StopRequest: the first SIGINT or SIGTERM asks the loop to finish its step; the second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType


class StopRequest:
    """While entered, `signal` is the number of the first stop signal, or None. Main thread only."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            # No clean-up: a checkpoint is whole or not there, locks and device memory end with the process.
            os.write(sys.stderr.fileno(), b"\nmegatrain: second signal, aborted; the last saved step stands\n")
            os._exit(128 + number)
        self.signal = number
        os.write(sys.stderr.fileno(), b"\nmegatrain: finishing this step and saving; once more to abort\n")

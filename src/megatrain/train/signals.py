"""StopRequest: the first SIGINT, SIGTERM or SIGHUP asks the loop to finish its step; the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType, TracebackType


class StopRequest:
    """While entered, `signal` is the number of the first stop signal, or None. Main thread only."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started with nohup: meant to outlive its terminal
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is not None:
            # No clean-up: a checkpoint is whole or not there, locks and device memory end with the process.
            _tell(b"\nmegatrain: second signal, aborted; the last saved step stands\n")
            os._exit(128 + number)
        self.signal = number
        _tell(b"\nmegatrain: finishing this step and saving; once more to abort\n")


def _tell(text: bytes) -> None:
    """On standard error, if anyone still reads it: the terminal may be gone, and the save must go on."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), text)

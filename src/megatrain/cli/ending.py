"""How the program ends when a verb does not: signals unwind it; what failed is one sentence and an exit code."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Never

from megatrain.errors import UserError


class Stopped(BaseException):
    """SIGTERM or SIGHUP arrived; its number. Not an Exception: nothing but `one_sentence` may take it for a failure."""


@contextmanager
def stopping_cleanly() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP unwind as Ctrl-C does, so that what was begun is undone. The loop has its own ways."""

    def stop(number: int, _frame: FrameType | None) -> Never:
        raise Stopped(number)

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else started with nohup: meant to outlive its terminal
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Inside, a mistake of the user, a refusal of the system or a signal is said on stderr and ends the program."""
    try:
        yield
    except UserError as error:
        _fail(str(error), 2)
    except MemoryError as error:
        what = f"host memory ran out ({error})" if str(error) else "host memory ran out"
        _fail(f"{what}; end other programs, or raise the memory limit of the container", 2)
    except OSError as error:
        _fail(_of_system(error), 2)
    except Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        _fail(f"stopped by {number.name}", 128 + number)
    except KeyboardInterrupt:  # before a verb runs, or in one that has nothing to save
        _fail("interrupted", 128 + signal.SIGINT)


def _of_system(error: OSError) -> str:
    """What the system refused, of which file, and what to do about it."""
    what = str(error) if error.strerror is None else error.strerror
    if error.filename is not None:
        what += f": {str(error.filename)!r}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what}; free disk space"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what}; check that you may read and write there"
    if error.errno == errno.ENOMEM:
        return f"{what}; end other programs, or raise the memory limit of the container"
    return f"{what}; check that the file is there and may be read and written"


def _fail(message: str, code: int) -> Never:
    print(f"megatrain: {message}", file=sys.stderr)
    sys.exit(code)

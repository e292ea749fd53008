"""What a conversation is asked: typed, piped a line a turn, or all of standard input. None is read without end."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from megatrain.errors import DataError

PROMPT = "you> "
MOST_CHARACTERS = 8 << 20  # more than the longest context that models know; /dev/zero never ends a line


def whole_input() -> str:
    """All of standard input, as one prompt."""
    text = sys.stdin.read(MOST_CHARACTERS + 1)
    if len(text) > MOST_CHARACTERS:
        raise DataError(f"standard input is longer than {MOST_CHARACTERS:,} characters; give a shorter prompt")
    return text.rstrip("\n")


def piped_lines() -> Iterator[str]:
    """The lines of standard input."""
    while line := sys.stdin.readline(MOST_CHARACTERS + 1):
        if len(line) > MOST_CHARACTERS:
            raise DataError(
                f"a line of standard input is longer than {MOST_CHARACTERS:,} characters; give one prompt a line"
            )
        refuse_no_text(line)
        yield line.strip()


def typed_lines() -> Iterator[str]:
    """The lines of a terminal, until Ctrl-D or Ctrl-C."""
    while True:
        try:
            line = input(PROMPT)
            refuse_no_text(line)
        except (EOFError, KeyboardInterrupt):
            print()
            return
        except DataError as error:
            print(f"megatrain: {error}", file=sys.stderr)
            continue
        yield line.strip()


def refuse_no_text(text: str) -> None:
    """DataError if `text` came from bytes that are not UTF-8: the system hands them on as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"the prompt is not UTF-8 text (character {error.start + 1}); convert it to UTF-8") from None

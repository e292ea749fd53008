"""Standard input, output and error as the verbs need them."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

# Control characters but for line feed and tab -> a picture of them: a terminal obeys escape sequences.
PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
PICTURES |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def visible(text: str) -> str:
    """`text` as it may be shown on a terminal, whoever wrote it."""
    return text.translate(PICTURES)


def make_streams_usable() -> None:
    """All three are there, and no character is refused: one that a terminal has not is shown as "?".

    A stream that whoever started us has closed leads nowhere, and no file that is opened later takes its number. Bytes
    that are no text come in as those of arguments do, as lone surrogates: whoever reads them says what is wrong.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - as long as the program runs
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the program runs
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the program runs
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)

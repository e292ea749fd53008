"""The report page as a browser draws it. Without a Chromium these tests are skipped, and say that nobody looked."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from collections import Counter
from pathlib import Path

import pytest

from megatrain.report import page, read_record
from tests.report.runs import full_run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH, HEIGHT = 1000, 760
Colour = tuple[int, int, int]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here: the page's structure was tested, its looks were not"
    ),
]


def screenshot(html: Path, width: int, height: int, *, dark: bool = False) -> list[list[Colour]]:
    """Rows of pixels of the page's top, drawn at `width`."""
    assert CHROMIUM is not None
    target = html.with_suffix(f".{width}.{dark}.png")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={html.parent}/user"]
    command = [CHROMIUM, *words, *scheme, f"--window-size={width},{height}", f"--screenshot={target}", html.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return decoded(target.read_bytes())


def decoded(png: bytes) -> list[list[Colour]]:
    """Pixels of an 8-bit RGB or RGBA picture without interlacing, as Chromium writes them."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data = 8, b""
    width = height = size = 0
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert (depth, interlaced) == (8, 0)
            size = {2: 3, 6: 4}[colour]
        if kind == b"IDAT":
            data += body
        at += 12 + length
    raw, stride, rows = zlib.decompress(data), width * size, []
    above = bytearray(stride)
    for number in range(height):
        start = number * (stride + 1)
        row = bytearray(raw[start + 1 : start + 1 + stride])
        unfiltered(raw[start], row, above, size)
        rows.append([(row[i], row[i + 1], row[i + 2]) for i in range(0, stride, size)])
        above = row
    return rows


def unfiltered(kind: int, row: bytearray, above: bytearray, size: int) -> None:
    """Undo PNG's filter of one row, in place."""
    for i in range(len(row)):
        left = row[i - size] if i >= size else 0
        corner = above[i - size] if i >= size else 0
        if kind == 0:
            return
        if kind == 1:
            guess = left
        elif kind == 2:
            guess = above[i]
        elif kind == 3:
            guess = (left + above[i]) // 2
        else:
            nearest = left + above[i] - corner
            guess = min((left, above[i], corner), key=lambda value: abs(nearest - value))
        row[i] = (row[i] + guess) & 0xFF


def share(rows: list[list[Colour]], colour: Colour) -> float:
    """Part of all pixels that have exactly this colour."""
    counts = Counter(pixel for row in rows for pixel in row)
    return counts[colour] / sum(counts.values())


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = full_run(tmp_path_factory.mktemp("browser") / "first")
    path = run / "report/index.html"
    path.write_text(page(read_record(run)), "utf-8")
    return path


LIGHT = (False, (0xF6, 0xF6, 0xF3), (0xFF, 0xFF, 0xFF), (0x25, 0x63, 0xC9))
DARK = (True, (0x10, 0x12, 0x15), (0x19, 0x1C, 0x21), (0x6E, 0xA1, 0xFF))


@pytest.mark.parametrize(("dark", "paper", "card", "loss"), [LIGHT, DARK], ids=["light", "dark"])
def test_the_page_is_drawn(html: Path, paper: Colour, card: Colour, loss: Colour, *, dark: bool) -> None:
    rows = screenshot(html, WIDTH, HEIGHT, dark=dark)
    assert (len(rows[0]), len(rows)) == (WIDTH, HEIGHT)
    assert rows[0][0] == rows[-1][0] == rows[0][-1] == paper
    assert share(rows, card) > 0.5, "cards are there"
    assert 0.0003 < share(rows, loss) < 0.05, "the loss is a line, not a block and not nothing"
    assert len({pixel for row in rows for pixel in row}) > 100, "text has soft edges"


def test_nothing_sticks_out_on_a_narrow_screen(html: Path) -> None:
    rows = screenshot(html, 500, 1500)
    paper = rows[0][0]
    margin = [row[-8:] for row in rows]
    assert all(pixel == paper for row in margin for pixel in row), "the right margin is empty"
    assert sum(row[40] != paper for row in rows) > 800, "cards fill the width"

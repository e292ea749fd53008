"""The figure of `against_trainer`: losses above, differences from the fp32 Trainer below, on a logarithmic axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, GAP = 760, 580, 64, 16, 34, 68
PANEL = (HEIGHT - TOP - 2 * GAP) / 2
COLOURS = ("#1f1f1f", "#d1495b", "#6c8ead", "#2e7d32", "#c9a227")
FLOOR = 1e-8  # a difference of zero is drawn here


def figure(result: Mapping[str, Any]) -> str:
    """One SVG, readable on white and on black."""
    runs: Mapping[str, Mapping[str, Any]] = result["runs"]
    reference = next(iter(runs.values()))["losses"]
    curves = [run["losses"] for run in runs.values()]
    low, high = min(map(min, curves)), max(map(max, curves))
    gaps = [[max(FLOOR, abs(a - b)) for a, b in zip(curve, reference, strict=True)] for curve in curves]
    bottom = TOP + PANEL + GAP
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12" role="img"><title>Training loss of MegaTrain and of the Trainer of transformers</title>'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(LEFT, TOP - 12, f"Loss of each step ({escape(str(result['machine']))})"),
        _text(LEFT, bottom - 12, "Distance of that loss from the Trainer's in fp32"),
    ]
    for value in (low, (low + high) / 2, high):
        parts.append(_tick(TOP + PANEL * (high - value) / (high - low), f"{value:.2f}"))
    for power in range(-8, 1, 2):
        parts.append(_tick(bottom + PANEL * -power / 8, f"1e{power}"))
    for colour, name, curve, gap in zip(COLOURS, runs, curves, gaps, strict=False):
        parts.append(_line(curve, colour, lambda y: TOP + PANEL * (high - y) / (high - low)))
        if curve is not reference:
            parts.append(_line(gap, colour, lambda y: bottom + PANEL * max(0.0, -math.log10(y)) / 8))
        at = list(runs).index(name)
        x, y = LEFT + 340 * (at % 2), bottom + PANEL + 24 + 18 * (at // 2)
        parts.append(f'<rect x="{x}" y="{y - 9}" width="12" height="4" fill="{colour}"/>')
        parts.append(_text(x + 18, y - 3, escape(name)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(values: Sequence[float], colour: str, at: Any) -> str:
    step = (WIDTH - LEFT - RIGHT) / max(1, len(values) - 1)
    points = " ".join(f"{LEFT + i * step:.1f},{at(value):.1f}" for i, value in enumerate(values))
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" stroke-opacity="0.85" points="{points}"/>'


def _tick(y: float, label: str) -> str:
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>'
    return line + f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#444444">{label}</text>'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x}" y="{y:.1f}" fill="#222222">{words}</text>'

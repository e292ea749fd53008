"""Charts as inline SVG: lines with axes, bars of parts. Colours are classes, so that the page chooses them.

Pure functions of numbers; text is escaped. A value that is not finite is left out of the line and marked at the top.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

MAX_POINTS = 800  # of a line; more are reduced to the least and the greatest of each bucket
MAX_HOVERS = 120
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 30


@dataclass(frozen=True)
class Series:
    """Points (x, y) in order of x, drawn as a line or as dots in the page's colour `style` ("s1" …)."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    kind: Literal["line", "faint", "dots"] = "line"


@dataclass(frozen=True)
class Part:
    """A part of a bar."""

    name: str
    style: str
    value: float


def line_chart(
    series: Sequence[Series],
    show: Callable[[float], str],
    *,
    label: str,
    width: int = 560,
    height: int = 230,
    from_zero: bool = False,
) -> str:
    """Series over steps on common axes. `show` spells a value of y; `label` is read out where no picture is seen."""
    points = [point for one in series for point in one.points]
    finite = [y for _, y in points if math.isfinite(y)]
    if not finite:
        return '<p class="none">nothing recorded yet</p>'
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_ticks = ticks(0.0 if from_zero else min(finite), max(finite), 5)
    y_low, y_high = min(y_ticks[0], min(finite)), max(y_ticks[-1], max(finite))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / ((x_high - x_low) or 1.0) if x_high > x_low else 0.5
        up = (y - y_low) / ((y_high - y_low) or 1.0)
        return LEFT + across * (width - LEFT - RIGHT), height - BOTTOM - up * (height - TOP - BOTTOM)

    out = [f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">']
    for value in y_ticks:
        _, y = at(x_low, value)
        out.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{width - RIGHT}" y2="{y:.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(show(value))}</text>')
    for value in whole_ticks(x_low, x_high, 7):
        x, _ = at(value, y_low)
        out.append(f'<text class="tick" x="{x:.1f}" y="{height - 9}" text-anchor="middle">{value:,}</text>')
    for one in series:
        out += _drawn(one, at, show)
    return "".join(out) + "</svg>"


def _drawn(
    one: Series, at: Callable[[float, float], tuple[float, float]], show: Callable[[float], str]
) -> Iterator[str]:
    good = [(x, y) for x, y in one.points if math.isfinite(y)]
    if one.kind != "dots":
        for run in _unbroken(one.points):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in reduced(run)))
            yield f'<polyline class="line {one.kind} {one.style}" points="{path}"/>'
    if one.kind == "dots" or len(good) == 1:
        for x, y in (at(*point) for point in good):
            yield f'<circle class="dot {one.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'
    for x, y in one.points:
        if not math.isfinite(y):
            left, _ = at(x, good[0][1] if good else 0.0)
            words = escape(f"{one.name}, step {x:g}: {y}")
            yield f'<path class="bad" d="M{left - 4:.1f} {TOP - 8} h8 l-4 7 z"><title>{words}</title></path>'
    if one.kind != "faint" or len(good) <= MAX_HOVERS:
        stride = -(-len(good) // MAX_HOVERS)
        for point in good[:: stride or 1]:
            x, y = at(*point)
            words = escape(f"{one.name}, step {point[0]:g}: {show(point[1])}")
            yield f'<circle class="hover {one.style}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{words}</title></circle>'


def _unbroken(points: Sequence[tuple[float, float]]) -> Iterator[list[tuple[float, float]]]:
    """Runs of finite points."""
    run: list[tuple[float, float]] = []
    for point in points:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def reduced(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about MAX_POINTS of them; the least and the greatest of every bucket stay, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return list(points)
    size = -(-len(points) * 2 // MAX_POINTS)
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Each finite y replaced by the mean of the finite ones at most `window` places away, fewer at the ends."""
    good = [point for point in points if math.isfinite(point[1])]
    sums = [0.0]
    for _, y in good:
        sums.append(sums[-1] + y)
    out = []
    for i, (x, _) in enumerate(good):
        first, stop = max(0, i - window), min(len(good), i + window + 1)
        out.append((x, (sums[stop] - sums[first]) / (stop - first)))
    return out


def bar(parts: Sequence[Part], whole: float, mark: float | None, show: Callable[[float], str], *, label: str) -> str:
    """One horizontal bar of `parts` on a track of length `whole`, with a mark at a measured value."""
    width, height, thick = 1000, 34, 18
    whole = max(whole, sum(part.value for part in parts), mark or 0.0) or 1.0
    out = [f'<svg class="bar" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">']
    out.append(f'<rect class="track" x="0" y="8" width="{width}" height="{thick}" rx="4"/>')
    left = 0.0
    for part in parts:
        size = part.value / whole * width
        words = escape(f"{part.name}: {show(part.value)}")
        gap = 1.5 if size > 4 else 0.0
        out.append(
            f'<rect class="part {part.style}" x="{left:.1f}" y="8" width="{max(size - gap, 0.5):.1f}" '
            f'height="{thick}" rx="2"><title>{words}</title></rect>'
        )
        left += size
    if mark is not None:
        x = mark / whole * width
        words = escape(f"measured peak: {show(mark)}")
        out.append(f'<path class="mark" d="M{x:.1f} 2 V{height - 2}"><title>{words}</title></path>')
    return "".join(out) + "</svg>"


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round values that span [low, high]."""
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def whole_ticks(low: float, high: float, count: int) -> list[int]:
    """Whole numbers within [low, high], round ones, at most about `count`."""
    if high - low < 1:
        return [round(low)]
    one, two = ticks(low, high, count)[:2]
    step = max(1, round(two - one))
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]

"""Chart: a step as a picture, SVG written by hand: bytes in use by tier over time, and the lanes as a Gantt chart.

Of a plan (simulated times) and of a trace (real times) the same picture is drawn: they can be laid side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from megatrain.planner.occupancy import Level
from megatrain.planner.table import TIERS, gib
from megatrain.planner.traced import Span
from megatrain.schedule.ops import Lane
from megatrain.schedule.plan import Tier

WIDTH, LEFT, RIGHT = 1200, 110, 20
PANEL, GAP, LANE_HEIGHT, TOP = 150, 34, 34, 46
TIER_COLOURS: Mapping[Tier, str] = {"hbm": "#c2410c", "ram": "#1d4ed8", "disk": "#52525b"}
LANES = tuple(map(str, Lane))
KIND_COLOURS = {
    "FORWARD": "#2563eb",
    "BACKWARD": "#7c3aed",
    "HEAD": "#db2777",
    "UPDATE": "#ea580c",
    "FETCH": "#0891b2",
    "FETCH_STATE": "#0e7490",
    "DRAIN": "#16a34a",
    "STORE_STATE": "#65a30d",
    "LOAD_STATE": "#ca8a04",
    "SPILL": "#78350f",
}
OTHER = "#a1a1aa"


def chart(
    title: str, spans: Sequence[Span], levels: Mapping[Tier, Sequence[Level]], budgets: Mapping[Tier, int]
) -> str:
    """The picture. `levels` may be empty: then only the lanes are drawn."""
    end_s = max((span.end_s for span in spans), default=0.0) or 1.0
    parts, y = [f'<text x="{LEFT}" y="24" font-size="16">{escape(title)}</text>'], TOP
    for tier in TIERS:
        if levels.get(tier):
            parts += _memory(tier, levels[tier], budgets.get(tier, 0), end_s, y)
            y += PANEL + GAP
    lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    for lane in lanes:
        parts += _lane(lane, [span for span in spans if span.lane == lane], end_s, y)
        y += LANE_HEIGHT
    parts += _axis(end_s, y)
    parts += _legend(spans, y + 44)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 64}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="12">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _x(time_s: float, end_s: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * time_s / end_s


def _memory(tier: Tier, levels: Sequence[Level], budget: int, end_s: float, top: float) -> Iterable[str]:
    """Bytes in use as an area, with the budget as a dashed line if it is near enough to be seen."""
    peak = max(level.num_bytes for level in levels)
    full = max(peak, budget if budget < 3 * peak else 0) * 1.05

    def height(num_bytes: int) -> float:
        return top + PANEL * (1 - num_bytes / full)

    points = [f"{_x(0, end_s):.1f},{top + PANEL:.1f}"]
    for level, after in zip(levels, [*levels[1:], Level(end_s, 0)], strict=True):
        y = height(level.num_bytes)
        points += [f"{_x(level.time_s, end_s):.1f},{y:.1f}", f"{_x(min(after.time_s, end_s), end_s):.1f},{y:.1f}"]
    points.append(f"{_x(end_s, end_s):.1f},{top + PANEL:.1f}")
    colour = TIER_COLOURS[tier]
    yield f'<text x="8" y="{top + 14:.0f}" fill="{colour}">{tier}</text>'
    yield f'<text x="{LEFT}" y="{top - 4:.0f}" fill="{colour}">peak {gib(peak)} of {gib(budget)}</text>'
    yield f'<polygon points="{" ".join(points)}" fill="{colour}" fill-opacity="0.25" stroke="{colour}"/>'
    if budget <= full:
        y = height(budget)
        yield (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" '
            'stroke-dasharray="6 4"/>'
        )


def _lane(lane: str, spans: Sequence[Span], end_s: float, top: float) -> Iterable[str]:
    busy_s = sum(span.end_s - span.start_s for span in spans)
    yield f'<text x="8" y="{top + 20:.0f}">{lane} {busy_s / end_s:.0%}</text>'
    for span in spans:
        x, width = _x(span.start_s, end_s), _x(span.end_s, end_s) - _x(span.start_s, end_s)
        name = f"{span.kind} {span.segment}" + ("" if span.micro_batch is None else f" m{span.micro_batch}")
        tip = f"{name}: {(span.end_s - span.start_s) * 1000:.2f} ms from {span.start_s:.3f} s"
        yield (
            f'<rect x="{x:.2f}" y="{top + 4:.0f}" width="{max(width, 0.3):.2f}" height="{LANE_HEIGHT - 8}" '
            f'fill="{KIND_COLOURS.get(span.kind, OTHER)}"><title>{escape(tip)}</title></rect>'
        )


def _axis(end_s: float, top: float) -> Iterable[str]:
    for tenth in range(0, 11, 2):
        x = _x(end_s * tenth / 10, end_s)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{top + 4:.0f}" stroke="#e4e4e7"/>'
        yield f'<text x="{x:.1f}" y="{top + 18:.0f}" text-anchor="middle">{end_s * tenth / 10:.3g} s</text>'


def _legend(spans: Sequence[Span], y: float) -> Iterable[str]:
    seen = {span.kind for span in spans}
    kinds = [(kind, colour) for kind, colour in KIND_COLOURS.items() if kind in seen]
    if seen - KIND_COLOURS.keys():
        kinds.append(("other", OTHER))
    for number, (kind, colour) in enumerate(kinds):
        x = LEFT + number * 120
        yield f'<rect x="{x}" y="{y - 10:.0f}" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 18}" y="{y:.0f}">{kind}</text>'

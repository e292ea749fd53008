"""Text: a schedule as one line an op, and back, without loss."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatrain.schedule.ops import Kind, Lane, Op, Place, Schedule

# What follows the pool in a place: a key (segment, slot or block), a micro-batch, both, or nothing.
_HOMES = {"ram.w", "ram.state", "ram.grad", "hbm.state", "disk.w", "disk.state", "land.w", "land.state", "land.grad"}
_KEY = frozenset({"w", "g", "s", "norm", "file"} | _HOMES)
_MICRO_BATCH = frozenset({"dact", "call", "loss"})
_BOTH = frozenset({"act", "h", "kept", "attn", "ram.act"})
_ALONE = frozenset({"cell", "tied.grad"})

# A longer column (CLIP reads everything) sticks out instead of widening every line.
_MAX_COLUMN_CHARS = 60


class ScheduleTextError(ValueError):
    """A line is not an op; the message names the line, the part, and what should stand there."""


def to_text(schedule: Sequence[Op]) -> str:
    """One aligned line an op: KIND SEGMENT [mN] @lane [r:places] [w:places] [wait:tokens] [-> token]."""
    rows = [_columns(op) for op in schedule]
    lengths = [[len(c) for c in column if len(c) <= _MAX_COLUMN_CHARS] for column in zip(*rows, strict=True)]
    widths = [max(column, default=0) for column in lengths]
    lines = ("  ".join(c.ljust(width) for c, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(line + "\n" for line in lines)


def _columns(op: Op) -> tuple[str, ...]:
    return (
        op.kind,
        op.segment or "-",
        "" if op.micro_batch is None else f"m{op.micro_batch}",
        f"@{op.lane}",
        "r:" + ",".join(map(str, op.reads)) if op.reads else "",
        "w:" + ",".join(map(str, op.writes)) if op.writes else "",
        "wait:" + ",".join(op.waits) if op.waits else "",
        "" if op.records is None else f"-> {op.records}",
    )


def parse(text: str) -> Schedule:
    """The schedule that `text` shows. Empty lines and lines that start with # are skipped."""
    ops: list[Op] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            ops.append(_parse_op(words))
        except ScheduleTextError as error:
            raise ScheduleTextError(f"line {number}: {error}: {line.strip()!r}") from None
    return tuple(ops)


def _parse_op(words: list[str]) -> Op:
    rest = list(words)
    kind = _take(rest, r"([A-Z_]+)", "a kind such as FETCH")
    segment = _take(rest, r"(-|[A-Z][A-Z0-9]*)", "a segment such as L000, or -")
    micro_batch = _take(rest, r"m(\d+)", None)
    lane = _take(rest, r"@(\w+)", "a lane such as @compute")
    reads, writes = _take(rest, r"r:(\S+)", None), _take(rest, r"w:(\S+)", None)
    waits = _take(rest, r"wait:([a-z]\w*(?:,[a-z]\w*)*)", None)
    records = None
    if rest and rest[0] == "->":
        del rest[0]
        records = _take(rest, r"([a-z]\w*)", "a token after ->")
    if rest:
        raise ScheduleTextError(f"{rest[0]!r} is not expected here; the order is r: w: wait: ->")
    if kind not in Kind.__members__:
        raise ScheduleTextError(f"unknown kind {kind!r}; known are {', '.join(Kind)}")
    if lane not in set(Lane):
        raise ScheduleTextError(f"unknown lane {lane!r}; known are {', '.join(Lane)}")
    return Op(
        Kind(kind),
        "" if segment == "-" else str(segment),
        None if micro_batch is None else int(micro_batch),
        Lane(lane),
        tuple(map(parse_place, reads.split(","))) if reads else (),
        tuple(map(parse_place, writes.split(","))) if writes else (),
        tuple(waits.split(",")) if waits else (),
        records,
    )


def _take(words: list[str], pattern: str, wanted: str | None) -> str | None:
    """Remove the first word if it has `pattern` and return its group; else complain, or return None if not `wanted`."""
    match = re.fullmatch(pattern, words[0], re.ASCII) if words else None
    if match:
        del words[0]
        return match[1]
    if wanted is None:
        return None
    raise ScheduleTextError(f"{words[0]!r} is not {wanted}" if words else f"the line ends before {wanted}")


def parse_place(text: str) -> Place:
    """The place that prints as `text`."""
    words = text.split(".")
    pool = ".".join(words[:2]) if ".".join(words[:2]) in _KEY | _BOTH | _ALONE else words[0]
    rest = words[pool.count(".") + 1 :]
    if pool in _ALONE and not rest:
        return Place(pool)
    if pool in _KEY and len(rest) == 1 and rest[0]:
        return Place(pool, int(rest[0]) if rest[0].isdecimal() else rest[0])
    numbers = [int(word) for word in rest if word.isdecimal()]
    if len(numbers) == len(rest):
        if pool in _MICRO_BATCH and len(rest) == 1:
            return Place(pool, "", numbers[0])
        if pool in _BOTH and len(rest) == 2:
            return Place(pool, numbers[0], numbers[1])
    raise ScheduleTextError(f"{text!r} is not a place such as w.0, ram.w.L000, act.3.1 or cell")

"""Trace: what happened, op by op, in seconds from the first op."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.engine.lanes import Mark
from megatrain.schedule.ops import Lane, Op


@dataclass(frozen=True)
class TraceRow:
    """One op, from its start mark to its end mark (its waits are before the start)."""

    op: Op
    start: Mark
    end: Mark


def _between_s(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1000.0
    assert isinstance(start, float), "two marks of one clock"
    assert isinstance(end, float), "two marks of one clock"
    return end - start


@dataclass(frozen=True)
class Trace:
    """Rows lane by lane, in order within a lane. Host lanes and streams keep clocks of their own."""

    rows: tuple[TraceRow, ...]

    def busy_s(self) -> dict[str, float]:
        """Seconds of work a lane did: on a stream, from the moment an op could start to its end."""
        busy = {str(lane): 0.0 for lane in Lane}
        for row in self.rows:
            busy[str(row.op.lane)] += _between_s(row.start, row.end)
        return busy

    def timed(self) -> Iterator[tuple[Op, float, float]]:
        """(op, start_s, end_s), each from the earliest start on a lane of the same clock."""
        base: dict[type, Mark] = {}
        for row in self.rows:
            zero = base.setdefault(type(row.start), row.start)
            if _between_s(zero, row.start) < 0.0:  # a lane listed later began earlier
                base[type(row.start)] = row.start
        for row in self.rows:
            zero = base[type(row.start)]
            yield row.op, _between_s(zero, row.start), _between_s(zero, row.end)

    def write(self, path: Path) -> None:
        """One JSON object an op: kind, segment, micro_batch, lane, start_s, end_s."""
        with path.open("w", encoding="utf-8") as file:
            for op, start_s, end_s in self.timed():
                row = {"kind": op.kind, "segment": op.segment, "micro_batch": op.micro_batch, "lane": op.lane}
                file.write(json.dumps(row | {"start_s": round(start_s, 7), "end_s": round(end_s, 7)}) + "\n")

"""Parts: what each segment of a plan brings to a step, worked out once, as rows and as columns. No torch."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np

from megatrain.planner import sizes
from megatrain.planner.known import Known
from megatrain.planner.prediction import Workload
from megatrain.schedule.ops import Kind, Lane, Op, Place
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.schedule.slots import kept_places

T = TypeVar("T", float, np.ndarray)


class Part(NamedTuple, Generic[T]):
    """What a segment brings to a step, or, as columns, each segment of a plan; 0 of what it has not. Passes: of all
    micro-batches."""

    forward_s: T
    backward_s: T
    again_s: T  # a second backward, which finds nothing kept
    sums_s: T  # its gradient cleared, and its norm
    device_s: T  # its update there
    host_s: T  # its update there
    fetched_bytes: T  # its weights, to a shared slot
    own_bytes: T  # its weights, to a slot of their own, once
    drained_bytes: T  # its gradient, home to RAM
    shared_bytes: T  # of that, what leaves a shared slot
    passing_in_bytes: T  # its gradient and state, to an update on the device
    passing_out_bytes: T  # its state and weights, home
    input_bytes: T
    weights_s: T  # to read them from the disk
    state_s: T
    spill_s: T
    way: T  # stretches of blocks are cut where it changes


class Parts:
    """The parts of the segments of one run's plans."""

    def __init__(self, work: Workload) -> None:
        self._work = work
        self._known = Known()
        self._rows: list[Part[float]] = []
        self._table, self._filled = np.empty((0, len(Part._fields))), 0
        self._ways: dict[tuple[object, ...], int] = {}

    def of(self, plan: Plan) -> tuple[list[Part[float]], Part[np.ndarray]]:
        """Row by row, in the order of the plan's segments, and column by column."""

        def number(index: int) -> int:
            self._rows.append(self._counted(plan.segments[index], index >= plan.lowest_trainable))
            return len(self._rows) - 1

        numbers = self._known.of(plan.segments, number)
        if len(self._rows) > self._filled:
            self._fill()
        return [self._rows[number] for number in numbers], Part(*self._table[numbers].T)

    def _fill(self) -> None:
        """Bring the table up to the rows."""
        more = np.array(self._rows[self._filled :])
        if len(self._rows) > len(self._table):  # twice as long: it grows by a few rows, a hundred times
            self._table = np.resize(self._table, (2 * len(self._rows), len(Part._fields)))
        self._table[self._filled : len(self._rows)] = more
        self._filled = len(self._rows)

    def _counted(self, segment: SegmentPlan, comes_back: bool) -> Part[float]:
        """`comes_back`: the backward pass reaches it; below the lowest trainable segment nothing is kept."""
        shapes, name = self._work.shapes, segment.name
        grad = (Place("g", name),) if segment.trainable else ()
        kept = kept_places(segment, 0, 0) if comes_back else ()
        lost = () if segment.activations == "keep" else kept
        there: Kind | None = Kind.FORWARD if segment.kind == "block" else None
        back = {"block": Kind.BACKWARD, "head": Kind.HEAD}.get(segment.kind) if comes_back else None
        away, passes = segment.trainable and segment.state != "hbm", segment.streams_state
        on_host, on_device = away and not passes, segment.trainable and (passes or not away)
        weights_bytes, state_bytes = sizes.weights_bytes(shapes, name), sizes.state_bytes(shapes, name)
        update_s = self._op_s(Kind.UPDATE, name, Lane.COMPUTE if on_device else Lane.HOST) if segment.trainable else 0.0
        drained_bytes = sizes.gradient_bytes(shapes, name) if away else 0
        return Part(
            forward_s=self._visits_s(there, name, (), kept),
            backward_s=self._visits_s(back, name, kept, grad),
            again_s=self._visits_s(back, name, lost, grad),
            sums_s=sum(self._op_s(kind, name, Lane.COMPUTE, (), grad) for kind in (Kind.ZERO, Kind.NORM) if grad),
            device_s=update_s if on_device else 0.0,
            host_s=update_s if on_host else 0.0,
            fetched_bytes=weights_bytes if segment.weights == "pool" else 0,
            own_bytes=weights_bytes if segment.weights == "own" and segment.state != "hbm" else 0,
            drained_bytes=drained_bytes,
            shared_bytes=drained_bytes if segment.kind == "block" and segment.grads == "pool" else 0,
            passing_in_bytes=drained_bytes + state_bytes if passes else 0,
            passing_out_bytes=state_bytes + weights_bytes if passes else 0,
            input_bytes=sizes.one_boundary_bytes(shapes) * self._work.num_micro_batches,
            **self._disk_s(segment, on_host),
            way=self._ways.setdefault(
                (segment.weights, segment.grads, segment.weights_home, segment.activations == "keep"), len(self._ways)
            ),
        )

    def _disk_s(self, segment: SegmentPlan, on_host: bool) -> dict[str, float]:
        name = segment.name
        weights = ((Place("disk.w", name),), (Place("land.w", 0),)) if segment.weights_on_disk else None
        state = ((Place("disk.state", name),), (Place("land.state", 0),)) if segment.state_on_disk else None
        changed = [home for home, _ in filter(None, (state, weights))] if on_host else []
        homes = tuple(place for home in changed for place in home)
        return {
            "weights_s": self._op_s(Kind.LOAD, name, Lane.DISK_READ, *weights) if weights else 0.0,
            "state_s": self._op_s(Kind.LOAD_STATE, name, Lane.DISK_READ, *state) if state else 0.0,
            "spill_s": self._op_s(Kind.SPILL, name, Lane.DISK, homes, homes) if homes else 0.0,
        }

    def _visits_s(self, kind: Kind | None, name: str, reads: tuple[Place, ...], writes: tuple[Place, ...]) -> float:
        """Of all micro-batches."""
        if kind is None:
            return 0.0
        return self._work.num_micro_batches * self._op_s(kind, name, Lane.COMPUTE, reads, writes, 0)

    def _op_s(self, kind: Kind, name: str, lane: Lane, reads: tuple[Place, ...] = (), writes: tuple[Place, ...] = (),
              micro_batch: int | None = None) -> float:  # fmt: skip
        return self._work.costs.seconds(Op(kind, name, micro_batch, lane, reads, writes))

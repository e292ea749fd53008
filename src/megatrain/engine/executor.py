"""The executor: one issuing thread a lane, a loop, and a dispatch table. It decides nothing.

The caller's own thread issues the compute lane: on a CPU the same products ran 5 to 10 % slower on a thread of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping

from megatrain.engine.lanes import LaneDevice, Mark
from megatrain.engine.trace import Trace, TraceRow
from megatrain.schedule.ops import Kind, Lane, Op, Schedule
from megatrain.schedule.text import to_text

Handler = Callable[[Op], None]


class _Token:
    """`mark` is valid once `issued` is set."""

    __slots__ = ("issued", "mark")

    def __init__(self) -> None:
        self.issued = threading.Event()
        self.mark: Mark = 0.0


class _Run:
    """One pass over a schedule: its tokens, what has happened, and the first error."""

    def __init__(self, schedule: Schedule, lanes: tuple[Lane, ...]) -> None:
        self.ops = {lane: [op for op in schedule if op.lane == lane] for lane in lanes}
        self.tokens = {op.records: _Token() for op in schedule if op.records is not None}
        self.rows: dict[Lane, list[tuple[Op, Mark, Mark]]] = {lane: [] for lane in lanes}
        self.error: BaseException | None = None
        self.left = len(lanes)
        self.lock = threading.Lock()
        self.done = threading.Event()

    def fail(self, error: BaseException) -> None:
        """Remember the first error and wake every waiting lane, so that none hangs."""
        with self.lock:
            self.error = self.error or error
        for token in self.tokens.values():
            token.issued.set()

    def lane_finished(self) -> None:
        with self.lock:
            self.left -= 1
            if self.left == 0:
                self.done.set()


class Executor:
    """Runs schedules. `run` returns when every lane has drained, or raises the first error of any lane: then all have
    drained too, save after an interrupt of the caller's thread (Ctrl-C), which `close` waits for.

    handlers: op kind -> what to do. lanes: lane -> where it happens.
    """

    def __init__(self, lanes: Mapping[Lane, LaneDevice], handlers: Mapping[Kind, Handler]) -> None:
        self._lanes = lanes
        self._handlers = handlers
        others = [lane for lane in lanes if lane != Lane.COMPUTE]
        self._inbox: dict[Lane, queue.SimpleQueue[_Run | None]] = {lane: queue.SimpleQueue() for lane in others}
        self._threads = [
            threading.Thread(target=self._serve, args=(lane,), name=f"megatrain-{lane}", daemon=True) for lane in others
        ]
        for thread in self._threads:
            thread.start()

    def run(self, schedule: Schedule) -> Trace:
        """Run every op of `schedule`; lanes start and end idle."""
        run = _Run(schedule, tuple(self._lanes))
        try:
            for inbox in self._inbox.values():
                inbox.put(run)
            compute = self._lanes[Lane.COMPUTE]
            with compute.context():
                self._issue(run, Lane.COMPUTE, compute)
            run.done.wait()
        finally:
            if not run.done.is_set():  # Ctrl-C between two ops: else lanes would wait for ever for this one
                run.fail(KeyboardInterrupt())
        if run.error is not None:
            raise run.error
        return Trace(tuple(TraceRow(op, start, end) for rows in run.rows.values() for op, start, end in rows))

    def close(self) -> None:
        """Stop the lane threads."""
        for inbox in self._inbox.values():
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self, lane: Lane) -> None:
        device = self._lanes[lane]
        with device.context():
            while (run := self._inbox[lane].get()) is not None:
                self._issue(run, lane, device)

    def _issue(self, run: _Run, lane: Lane, device: LaneDevice) -> None:
        """All of a run's ops of one lane; an error, of any kind, is left in the run for the caller."""
        for part in (lambda: self._run_lane(run, lane, device), device.drain):  # what was queued before an error, too
            try:
                part()
            except BaseException as error:  # noqa: BLE001 - it reaches the caller through the run
                unfinished = run.ops[lane][len(run.rows[lane]) :]
                if unfinished:
                    error.add_note(f"op: {to_text(unfinished[:1]).strip()}")
                run.fail(error)
        run.lane_finished()

    def _run_lane(self, run: _Run, lane: Lane, device: LaneDevice) -> None:
        rows = run.rows[lane]
        for op in run.ops[lane]:
            for name in op.waits:
                run.tokens[name].issued.wait()
            if run.error is not None:
                return
            for name in op.waits:
                device.wait(run.tokens[name].mark)
            start = device.mark()
            self._handlers[op.kind](op)
            end = device.mark()
            if op.records is not None:
                token = run.tokens[op.records]
                token.mark = end
                token.issued.set()
            rows.append((op, start, end))

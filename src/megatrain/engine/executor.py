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


class _Run:
    """One pass over a schedule: what lanes tell one another, what has happened, and the errors, the first one first.

    Lanes share lists and queues written in C and no lock. Ctrl-C comes between any two steps of Python in the caller's
    thread, and inside a `threading.Event` it left the lock taken: a lane, or `fail` itself, then waited for ever.
    """

    def __init__(self, schedule: Schedule, lanes: tuple[Lane, ...]) -> None:
        self.ops = {lane: [op for op in schedule if op.lane == lane] for lane in lanes}
        self.mail: dict[Lane, queue.SimpleQueue[tuple[str, Mark]]] = {lane: queue.SimpleQueue() for lane in lanes}
        self.readers: dict[str | None, list[Lane]] = {}  # token -> the lanes that wait for it, which are sent its mark
        for op in schedule:
            for name in op.waits:
                self.readers.setdefault(name, []).append(op.lane)
        self.rows: dict[Lane, list[tuple[Op, Mark, Mark]]] = {lane: [] for lane in lanes}
        self.errors: list[BaseException] = []
        self.ended: queue.SimpleQueue[Lane] = queue.SimpleQueue()

    def fail(self, error: BaseException) -> None:
        """Remember the error and wake every waiting lane, so that none hangs."""
        self.errors.append(error)
        for mail in self.mail.values():
            mail.put(("", 0.0))


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
        run, left = _Run(schedule, tuple(self._lanes)), set(self._lanes)
        try:
            for inbox in self._inbox.values():
                inbox.put(run)
            compute = self._lanes[Lane.COMPUTE]
            with compute.context():
                self._issue(run, Lane.COMPUTE, compute)
            while left:
                left.remove(run.ended.get())
        finally:
            if left:  # Ctrl-C between two ops: else lanes would wait for ever for this one
                run.fail(KeyboardInterrupt())
        if run.errors:
            raise run.errors[0]
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
        run.ended.put(lane)

    def _run_lane(self, run: _Run, lane: Lane, device: LaneDevice) -> None:
        rows, mail = run.rows[lane], run.mail[lane]
        marks: dict[str, Mark] = {}  # what this lane was told so far
        for op in run.ops[lane]:
            for name in op.waits:
                while name not in marks and not run.errors:
                    told, mark = mail.get()
                    marks[told] = mark
            if run.errors:
                return
            for name in op.waits:
                device.wait(marks[name])
            start = device.mark()
            self._handlers[op.kind](op)
            end = device.mark()
            for reader in run.readers.get(op.records, ()):
                run.mail[reader].put((op.records, end))
            rows.append((op, start, end))

"""Check: prove a sequence of programs right, or point at the op that is wrong. Knows nothing of how schedules are made.

Vector clocks prove that every two conflicting accesses are ordered as listed, so every run acts like the list; then the
contents (meaning.py) are followed along the list. Programs are separated by idle lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatrain.schedule.contents import Content, Fault, Now
from megatrain.schedule.meaning import Meaning
from megatrain.schedule.ops import Lane, Op, Place, Program, Schedule
from megatrain.schedule.plan import Plan
from megatrain.schedule.text import to_text

_CONTEXT_LINES = 6
_MAY_BE_LEFT = ("dact",)  # HEAD and the lowest BACKWARD always give one, wanted or not


class ScheduleError(Exception):
    """A schedule is wrong: our bug, not the user's. Shows the ops around the place, and what is wrong there."""

    def __init__(self, where: str, schedule: Sequence[Op], index: int, reason: str) -> None:
        first = max(0, index - _CONTEXT_LINES)
        lines = to_text(schedule[first : index + _CONTEXT_LINES]).splitlines()
        shown = [f"{first + i:6}  {line}" for i, line in enumerate(lines)]
        at = index - first
        pointer = f"  <-- HERE: {reason}"
        shown[at : at + 1] = [shown[at] + pointer] if at < len(shown) else [f"{'end':>6}{pointer}"]
        super().__init__("\n".join([f"{where}, op {index}: {reason}", *shown]))
        self.index = index
        self.reason = reason


class Run(NamedTuple):
    """One program of a sequence, as it is to be executed."""

    program: Program
    schedule: Schedule
    num_micro_batches: int


def check(runs: Sequence[Run], plan: Plan) -> None:
    """Raise ScheduleError unless `runs`, one after the other from fresh weights, do exactly what they should.

    Proves: no race and no deadlock; every read finds the content it wants (segment, micro-batch, step); every gradient
    is summed once per micro-batch and in order; every step is settled by one UPDATE per trainable segment, in the
    program after it or, in two passes, in the second one; CLIP sees every norm and loss; only slots of the plan are
    used; no op is in vain.
    A skipped step (its cell says: leave everything) runs the same schedule, so step, skip, step is step, step, step.
    """
    held: dict[Place, Content] = {}
    steps: list[int] = [0]  # micro-batches of each step; step 0 is the start
    for number, run in enumerate(runs, start=1):
        before = settled = len(steps) - 1
        if run.program == "train":
            steps.append(run.num_micro_batches)
            settled += plan.clip_mode == "two-pass"
        now = Now(run.program, number, run.num_micro_batches, len(steps) - 1, settled, steps[settled], before)
        meaning = Meaning(plan, now)
        if number == 1:
            held = _fresh(plan, meaning)
        lasting = meaning.lasting(pending_update=number > 1 and runs[number - 2].program == "train")
        held = {place: content for place, content in held.items() if place in lasting}
        _check_program(f"program {number} ({run.program})", run.schedule, meaning, held)


def _fresh(plan: Plan, meaning: Meaning) -> dict[Place, Content]:
    held: dict[Place, Content] = {}
    for segment in plan.segments:
        state, weights, _ = meaning.homes(segment)
        held[weights] = meaning.weights(segment, 0)
        held[state] = meaning.state(segment, 0)
    return held


def _check_program(where: str, schedule: Schedule, meaning: Meaning, held: dict[Place, Content]) -> None:
    order, unread = _Order(), _Unread()
    for index, op in enumerate(schedule):
        try:
            order.issue(op)
            _follow(op, meaning, held)
            order.access(index, op, schedule)
            unread.access(index, op)
        except Fault as fault:
            raise ScheduleError(where, schedule, index, str(fault)) from None
    at_end = meaning.at_end()
    for place, content in at_end.items():
        if held.get(place) != content:
            reason = f"{place} is left with {_shown(held.get(place))}, must be left with {content}"
            raise ScheduleError(where, schedule, len(schedule), reason)
    for place, index in unread.writer.items():
        if place not in at_end and place.pool not in _MAY_BE_LEFT:
            raise ScheduleError(where, schedule, index, f"writes {place}, which nothing reads")


def _follow(op: Op, meaning: Meaning, held: dict[Place, Content]) -> None:
    """Check what `op` reads, and write what it writes."""
    need = meaning.need(op, held)
    for verb, places, wanted in (("reads", op.reads, need.reads), ("writes", op.writes, need.writes)):
        if len(places) != len(wanted):
            contents = ", ".join(str(content) for _, content in wanted) or "nothing"
            raise Fault(f"{verb} {len(places)} places, must {verb[:-1]} {len(wanted)}: {contents}")
        for place, (allowed, content) in zip(places, wanted, strict=True):
            if place not in allowed:
                raise Fault(f"{verb} {place}, which the plan does not give to {content}")
    for place, (_, content) in zip(op.reads, need.reads, strict=True):
        if held.get(place) != content:
            raise Fault(f"reads {place} which holds {_shown(held.get(place))}, wants {content}")
    news = {place: content for place, (_, content) in zip(op.writes, need.writes, strict=True)}
    if all(held.get(place) == content for place, content in news.items()):
        raise Fault(f"is in vain: {', '.join(map(str, news))} already so")
    held.update(news)


class _Unread:
    """Who wrote what has not been read since: work in vain if it is overwritten."""

    def __init__(self) -> None:
        self.writer: dict[Place, int] = {}

    def access(self, index: int, op: Op) -> None:
        for place in op.reads:
            self.writer.pop(place, None)
        for place in op.writes:
            if place in self.writer and place.pool not in _MAY_BE_LEFT:
                raise Fault(f"overwrites {place}, which op {self.writer[place]} wrote and nothing has read")
            self.writer[place] = index


def _shown(content: Content | None) -> str:
    return "nothing" if content is None else str(content)


class _Order:
    """Vector clocks: which ops are certainly done before another starts, by lane order and waits."""

    def __init__(self) -> None:
        self._lane_clock: dict[Lane, dict[Lane, int]] = {lane: {} for lane in Lane}
        self._token_clock: dict[str, dict[Lane, int]] = {}
        self._turn: list[tuple[Lane, int]] = []  # of each op: its lane, and how many of that lane came before
        self._writer: dict[Place, int] = {}
        self._readers: dict[Place, dict[Lane, int]] = {}

    def issue(self, op: Op) -> None:
        """Advance the lane of `op` past its waits. Only tokens that are recorded earlier in the list can be waited for:
        an event that is not recorded yet holds no stream back, and threads could deadlock."""
        clock = dict(self._lane_clock[op.lane])
        for token in op.waits:
            if token not in self._token_clock:
                raise Fault(f"waits for {token}, which no earlier op records")
            for lane, done in self._token_clock[token].items():
                clock[lane] = max(clock.get(lane, 0), done)
        turn = self._lane_clock[op.lane].get(op.lane, 0)
        self._turn.append((op.lane, turn))
        clock[op.lane] = turn + 1
        self._lane_clock[op.lane] = clock
        if op.records is not None:
            if op.records in self._token_clock:
                raise Fault(f"records {op.records}, which another op records")
            self._token_clock[op.records] = clock

    def access(self, index: int, op: Op, schedule: Schedule) -> None:
        """Raise Fault if `op` conflicts with an earlier op that may still run, or run later."""
        clock = self._lane_clock[op.lane]
        for place in {*op.reads, *op.writes}:
            earlier = [self._writer[place]] if place in self._writer else []
            if place in op.writes:
                earlier += self._readers.get(place, {}).values()
            for other in earlier:
                lane, turn = self._turn[other]
                if clock.get(lane, 0) <= turn:
                    name = " ".join(filter(None, [schedule[other].kind, schedule[other].segment]))
                    raise Fault(f"races on {place} with op {other} ({name} @{lane}): no wait orders them")
        for place in op.reads:
            self._readers.setdefault(place, {})[op.lane] = index
        for place in op.writes:
            self._writer[place] = index
            self._readers.pop(place, None)

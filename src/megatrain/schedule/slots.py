"""Slots: which weights and gradients sit where during the visits of a program, and when the next ones are fetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megatrain.schedule.ops import Kind, Lane, Op, Place
from megatrain.schedule.plan import Plan, SegmentPlan

_NEVER = 1 << 62


VisitKind = Literal["embed", "forward", "head", "backward", "embed_backward"]


class Visit(NamedTuple):
    """All micro-batches of a round at one segment, in one direction: what uses a slot without a break."""

    number: int  # in the order of the program
    kind: VisitKind
    index: int  # of the segment, in plan.segments
    micro_batches: range
    first_round: bool
    last_round: bool
    again: bool = False  # in a second pass, where every gradient is used up

    @property
    def is_first_use(self) -> bool:
        """Whether no visit before it needs the weights of its segment: a pending update comes right before it."""
        return self.first_round and self.kind in ("embed", "forward", "head")


class WeightSlots:
    """Fetches weights in visit order, as early as slots allow, into the slot whose next use is farthest (Belady).

    Those that live in HBM are there; nothing else that an earlier program left in a slot counts.
    """

    def __init__(self, plan: Plan, visits: Sequence[Visit]) -> None:
        self._wanted = [[plan.segments[i] for i in _weights_of(plan, visit)] for visit in visits]
        self._uses: dict[str, deque[int]] = {}
        for number, wanted in enumerate(self._wanted):
            for segment in wanted:
                self._uses.setdefault(segment.name, deque()).append(number)
        self._place = {s.name: Place("w", s.name) for s in plan.segments if s.state == "hbm"}
        self._held: list[str | None] = [None] * plan.weight_slots
        self._ahead = 0  # weights of visits before this one are in place or on their way

    def __getitem__(self, segment: str) -> Place:
        """Where the weights of a segment that the visit in progress uses are."""
        return self._place[segment]

    def fetch_after(self, done: int) -> list[tuple[int, Op]]:
        """FETCHes that may start once visit `done` has been listed, each with the visit it is for."""
        fetches: list[tuple[int, Op]] = []
        while self._ahead < len(self._wanted):
            for segment in self._wanted[self._ahead]:
                if segment.name in self._place:
                    continue
                place = self._free_place(segment, done)
                if place is None:
                    return fetches
                self._place[segment.name] = place
                home = Place("ram.w", segment.name)
                fetches.append((self._ahead, Op(Kind.FETCH, segment.name, None, Lane.H2D, (home,), (place,))))
            self._ahead += 1
        return fetches

    def _free_place(self, segment: SegmentPlan, done: int) -> Place | None:
        if segment.weights == "own":
            return Place("w", segment.name)
        next_uses = [self._next_use(name, done) for name in self._held]
        farthest = max(next_uses)
        if farthest <= self._ahead:
            return None  # every slot is needed before the visit this fetch is for
        slot = next_uses.index(farthest)
        evicted = self._held[slot]
        if evicted is not None:
            del self._place[evicted]
        self._held[slot] = segment.name
        return Place("w", slot)

    def _next_use(self, name: str | None, done: int) -> int:
        if name is None:
            return _NEVER + 1
        uses = self._uses[name]
        while uses and uses[0] <= done:
            uses.popleft()
        return uses[0] if uses else _NEVER


def _weights_of(plan: Plan, visit: Visit) -> tuple[int, ...]:
    return (visit.index, 0) if visit.kind == "head" and plan.tied else (visit.index,)


class InputSlots:
    """Where the input of each block is: a place of its own, or, if it is offloaded, the shared slots in turn."""

    def __init__(self, plan: Plan) -> None:
        self._turn = {block: turn for turn, block in enumerate(plan.offloaded)}
        self._num_slots = plan.act_slots
        self._waiting = frozenset(plan.waiting_in_ram)

    def place(self, block: int, micro_batch: int) -> Place:
        """Of the input of `block`; of HEAD's, if there is no such block."""
        if block not in self._turn:
            return Place("act", block, micro_batch)
        return Place("h", self._turn[block] % self._num_slots, micro_batch)

    def waits_in_ram(self, block: int) -> bool:
        """Whether the input of `block` leaves its slot between forward and backward."""
        return block in self._waiting

    def freed_for(self, block: int, last_pass: bool) -> int | None:
        """The block whose input comes back to the slot of `block`, once the backward of `block` is done: the next one
        that uses the slot, in this pass or, unless it is the last, in the one after it."""
        if block not in self._turn:
            return None
        turn = self._turn[block]
        sharing = [other for other in self._waiting if (self._turn[other] - turn) % self._num_slots == 0]
        below = max((other for other in sharing if other < block), default=None)
        return below if below is not None or last_pass else max((o for o in sharing if o != block), default=None)


def kept_places(segment: SegmentPlan, block: int, micro_batch: int) -> tuple[Place, ...]:
    """What a block keeps between its forward and its backward beside its input: one place, or none."""
    pool = {"keep": "kept", "keep_attention": "attn"}.get(segment.activations)
    return () if pool is None else (Place(pool, block, micro_batch),)


Fetch = tuple[int, int, Op]  # (the visit it is for, may start after this visit, op)


def _started(fetches: deque[Fetch], done: int) -> list[tuple[int, Op]]:
    """Takes from the front of `fetches` those that may start once visit `done` has been listed."""
    started: list[tuple[int, Op]] = []
    while fetches and fetches[0][1] <= done:
        visit, _, op = fetches.popleft()
        started.append((visit, op))
    return started


def _shared_grad_slots(plan: Plan) -> tuple[int, bool]:
    """How many of the shared gradient slots are used, no more than one a segment that shares them; and whether there
    are more such segments than slots."""
    num_sharing = sum(s.trainable and s.grads == "pool" for s in plan.segments)
    return min(plan.grad_slots, max(1, num_sharing)), num_sharing > plan.grad_slots


class PassingStates:
    """Segments that a train program updates on the device, in order of first use: each takes the next state slot in
    turn, and brings its gradient back, to the next shared slot in turn or to its own. `visits`: none if no update is
    pending.

    A slot is filled again a visit after it was used, if there is one between: what was in it is then home, and no
    weights queue behind it. (Up to a tenth of a step, simulated.)
    """

    def __init__(self, plan: Plan, visits: Sequence[Visit]) -> None:
        self._slots: dict[int, tuple[Place, Place]] = {}  # visit -> of gradient and state
        self._fetches: deque[Fetch] = deque()
        num_grad_slots, _ = _shared_grad_slots(plan)
        users: list[int] = []
        sharing: list[int] = []  # of these, those that share a gradient slot
        for visit in visits:
            segment, name = plan.segments[visit.index], plan.segments[visit.index].name
            if not (segment.streams_state and visit.is_first_use):
                continue
            state, after = Place("s", len(users) % plan.state_slots), _behind(users, plan.state_slots, visit)
            grad = Place("g", name)
            if segment.grads == "pool":
                grad = Place("g", len(sharing) % num_grad_slots)
                after = max(after, _behind(sharing, num_grad_slots, visit))
                sharing.append(visit.number)
            users.append(visit.number)
            self._slots[visit.number] = grad, state
            for kind, home, slot in ((Kind.FETCH_STATE, "ram.state", state), (Kind.FETCH_GRAD, "ram.grad", grad)):
                op = Op(kind, name, None, Lane.H2D, (Place(home, name),), (slot,))
                self._fetches.append((visit.number, after, op))

    def slots_of(self, visit: Visit) -> tuple[Place, Place] | None:
        """Where gradient and state are for the update that a visit waits for, if it is one of these."""
        return self._slots.get(visit.number)

    def fetch_after(self, done: int) -> list[tuple[int, Op]]:
        """Fetches that may start once visit `done` has been listed, each with the visit it is for."""
        return _started(self._fetches, done)


def _behind(users: Sequence[int], slots: int, visit: Visit) -> int:
    """The visit after the one that uses the slot which `visit` is next to use, but before `visit`; -1: none does."""
    return min(users[-slots] + 1, visit.number - 1) if len(users) >= slots else -1


class GradSlots:
    """Gives each backward visit the next shared slot in turn; from round 2 on, fetches the sum so far into it.

    If there are slots for all, each segment keeps its slot over the rounds, and nothing is fetched.
    """

    def __init__(self, plan: Plan, visits: Sequence[Visit]) -> None:
        self._plan = plan
        num_slots, self._rotates = _shared_grad_slots(plan)
        self._place: dict[int, Place] = {}
        self._fetches: deque[Fetch] = deque()
        users: list[int] = []
        for visit in visits:
            segment = plan.segments[visit.index]
            if not segment.trainable or visit.kind in ("embed", "forward"):
                continue
            if segment.grads == "own":
                self._place[visit.number] = Place("g", segment.name)
            else:
                slot = Place("g", len(users) % num_slots)
                self._place[visit.number] = slot
                if self._rotates and not visit.first_round:
                    op = Op(Kind.FETCH_GRAD, segment.name, None, Lane.H2D, (Place("ram.grad", segment.name),), (slot,))
                    self._fetches.append((visit.number, users[-num_slots], op))
                users.append(visit.number)

    def __getitem__(self, visit: Visit) -> tuple[Place, ...]:
        """The gradient slot of a visit's segment: one place, or none if the segment is frozen."""
        return (self._place[visit.number],) if visit.number in self._place else ()

    def leaves_after(self, visit: Visit) -> bool:
        """Whether the sum goes home to RAM after this visit: complete, or because its slot is given away."""
        segment = self._plan.segments[visit.index]
        if visit.number not in self._place:
            return False
        if self._plan.clip_mode == "two-pass" and not visit.again:
            return False  # it was for its norm alone
        if visit.last_round:
            return segment.state != "hbm"
        return segment.grads == "pool" and self._rotates

    def fetch_after(self, done: int) -> list[tuple[int, Op]]:
        """FETCH_GRADs that may start once visit `done` has been listed, each with the visit it is for."""
        return _started(self._fetches, done)

"""Meaning: what every op of a program must find in the places it reads, and what it leaves in those it writes.

Derived from kind, segment, micro-batch and step alone, without the builder: the checker's half of the words in ops.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from megatrain.schedule.contents import Content, Fault, Need, Now, Trio, Wanted
from megatrain.schedule.ops import CELL, TIED_GRAD, Kind, Lane, Op, Place, Program
from megatrain.schedule.plan import Plan, SegmentPlan

_EVERYWHERE = {Kind.UPDATE, Kind.LOAD, Kind.LOAD_STATE, Kind.SPILL}
_THROUGH = {Kind.FETCH, Kind.EMBED, Kind.FORWARD} | _EVERYWHERE
_ALLOWED: dict[Program, set[Kind]] = {
    "train": set(Kind) - {Kind.LOSS, Kind.SAVE},
    "eval": _THROUGH | {Kind.LOSS},
    "flush": _EVERYWHERE,
    "save": _EVERYWHERE | {Kind.SAVE},
}
_SEGMENT_KIND = {
    Kind.EMBED: "embed",
    Kind.FORWARD: "block",
    Kind.HEAD: "head",
    Kind.LOSS: "head",
    Kind.BACKWARD: "block",
    Kind.OFFLOAD: "block",
    Kind.RELOAD: "block",
    Kind.EMBED_BACKWARD: "embed",
    Kind.MERGE: "embed",
}
_LANE = {
    Kind.FETCH: Lane.H2D,
    Kind.FETCH_STATE: Lane.H2D,
    Kind.FETCH_GRAD: Lane.H2D,
    Kind.DRAIN: Lane.D2H,
    Kind.OFFLOAD: Lane.D2H,
    Kind.RELOAD: Lane.H2D,
    Kind.STORE: Lane.D2H,
    Kind.STORE_STATE: Lane.D2H,
    Kind.SAVE: Lane.DISK,
    Kind.SPILL: Lane.DISK,
    Kind.LOAD: Lane.DISK_READ,
    Kind.LOAD_STATE: Lane.DISK_READ,
}
# Of frozen segments too.
_OF_ALL = {Kind.LOAD, Kind.FETCH, Kind.EMBED, Kind.FORWARD, Kind.HEAD, Kind.LOSS, Kind.BACKWARD, Kind.SAVE}
_OF_ALL |= {Kind.OFFLOAD, Kind.RELOAD}


class Meaning:
    """The needs of the ops of one program."""

    def __init__(self, plan: Plan, now: Now) -> None:
        self.plan, self.now = plan, now
        self.two_pass = plan.clip_mode == "two-pass"
        self.again = False  # in a second pass
        self.number_of = {s.name: i for i, s in enumerate(plan.segments)}
        self.trainable = [s for s in plan.segments if s.trainable]
        shared_w = {Place("w", i) for i in range(plan.weight_slots)}
        shared_g = {Place("g", i) for i in range(plan.grad_slots)}
        self.weight_places = {s.name: {Place("w", s.name)} if s.weights == "own" else shared_w for s in plan.segments}
        self.grad_places = {s.name: {Place("g", s.name)} if s.grads == "own" else shared_g for s in plan.segments}
        self.landing = {pool: {Place(pool, i) for i in range(plan.disk_slots)} for pool in ("land.w", "land.state")}
        self.state_slots = {Place("s", i) for i in range(plan.state_slots)}
        self.landing["land.grad"] = {Place("land.grad", i) for i in range(plan.grad_landing_slots)}
        self.lowest = min((self.number_of[s.name] for s in self.trainable), default=len(plan.segments))
        self.has_tied_grad = plan.has_tied_grad
        self.offloaded, self.waiting_in_ram = frozenset(plan.offloaded), frozenset(plan.waiting_in_ram)
        self._of_micro_batch: dict[Kind, Callable[[SegmentPlan, int], Need]] = {
            Kind.EMBED: self._embed,
            Kind.FORWARD: self._forward,
            Kind.HEAD: self._head,
            Kind.LOSS: self._loss,
            Kind.OFFLOAD: self._offload,
            Kind.RELOAD: self._reload,
            Kind.BACKWARD: self._backward,
            Kind.EMBED_BACKWARD: self._embed_backward,
        }
        self._of_segment: dict[Kind, Callable[[SegmentPlan], Need]] = {
            Kind.FETCH_STATE: self._fetch_state,
            Kind.MERGE: self._merge,
            Kind.NORM: self._norm,
            Kind.UPDATE: self._update,
            Kind.STORE: self._store,
            Kind.STORE_STATE: self._store_state,
            Kind.SAVE: self._save,
        }

    def need(self, op: Op, held: Mapping[Place, Content]) -> Need:
        """What `op` must read and will write; raises Fault if there is no such op in this program."""
        self.again = self.two_pass and held.get(CELL) == Content("cell", when=self.now.step)
        if op.kind not in _ALLOWED[self.now.program]:
            raise Fault(f"{op.kind} has no place in {self.now.program}")
        if op.kind is Kind.CLIP:
            return self._clip(op)
        if op.segment not in self.number_of:
            raise Fault(f"the plan has no segment {op.segment!r}")
        segment = self.plan.segments[self.number_of[op.segment]]
        if segment.kind != _SEGMENT_KIND.get(op.kind, segment.kind):
            raise Fault(f"{op.kind} is no op of {segment.kind} segments")
        if op.kind not in _OF_ALL and not segment.trainable:
            raise Fault(f"{op.segment} is frozen")
        update_lane = Lane.COMPUTE if segment.state == "hbm" or self._passes(segment) else Lane.HOST
        lane = update_lane if op.kind is Kind.UPDATE else _LANE.get(op.kind, Lane.COMPUTE)
        if op.lane is not lane:
            raise Fault(f"is on lane {op.lane}, belongs on {lane}")
        if op.kind in self._of_micro_batch:
            if op.micro_batch is None or op.micro_batch >= self.now.num_micro_batches:
                raise Fault(f"has micro-batch {op.micro_batch} of {self.now.num_micro_batches}")
            return self._of_micro_batch[op.kind](segment, op.micro_batch)
        if op.micro_batch is not None:
            raise Fault(f"has micro-batch {op.micro_batch}, but {op.kind} is for all of them")
        if op.kind in self._of_segment:
            return self._of_segment[op.kind](segment)
        if op.kind is Kind.ZERO:
            return self._zero(segment, op.writes)
        found = held.get(op.reads[0]) if op.reads else None
        if op.kind is Kind.FETCH:
            return self._fetch(segment, found)
        if op.kind in (Kind.LOAD, Kind.LOAD_STATE):
            return self._load(op.kind, segment, found)
        if op.kind is Kind.SPILL:
            return self._spill(segment, found)
        return self._move_grad(op.kind, segment, found)

    def at_end(self) -> dict[Place, Content]:
        """What places must hold when the program is over."""
        now = self.now
        wanted: dict[Place, Content] = {}
        late = {name: Place("land.state", slot) for name, slot in self.plan.spilled_late if now.program == "train"}
        for segment in self.trainable:
            homes = self.homes(segment)
            if now.program == "train" and not self.two_pass:
                wanted[homes.grad] = self._complete(segment, now.step, now.num_micro_batches)
            wanted[late.get(segment.name, homes.state)] = self.state(segment)
            wanted[homes.weights] = self.weights(segment)
        if now.program == "train":
            wanted[CELL] = Content("cell", when=now.step)
        if now.program in ("train", "eval"):
            wanted |= {Place("loss", "", m): self._loss_of(m) for m in range(now.num_micro_batches)}
        if now.program == "save":
            wanted |= {Place("file", s.name): self._file(s) for s in self.plan.segments}
        return wanted

    def homes(self, segment: SegmentPlan) -> Trio:
        """Where state, weights and gradient of a segment live between programs."""
        name = segment.name
        if segment.state == "hbm":
            return Trio(Place("hbm.state", name), Place("w", name), Place("g", name))
        state, weights = Place(f"{segment.state}.state", name), Place(f"{segment.weights_home}.w", name)
        return Trio(state, weights, Place("ram.grad", name))

    def _passes(self, segment: SegmentPlan) -> bool:
        """Whether this program updates a segment in slots that its state passes through."""
        return segment.streams_state and self.now.program == "train"

    def lasting(self, pending_update: bool) -> set[Place]:
        """The places whose content outlives a program."""
        kept = {place for s in self.plan.segments for place in self.homes(s)} | {CELL}
        if pending_update:
            kept |= {Place("land.state", slot) for _, slot in self.plan.spilled_late}
        return kept

    # contents ------------------------------------------------------------------------------------------------------

    def weights(self, segment: SegmentPlan, after: int | None = None) -> Content:
        when = self.now.settled if after is None else after
        return Content("weights", segment.name, when=when if segment.trainable else 0)

    def state(self, segment: SegmentPlan, after: int | None = None) -> Content:
        return Content("state", segment.name, when=self.now.settled if after is None else after)

    def _file(self, segment: SegmentPlan) -> Content:
        return Content("file", segment.name, when=self.now.settled if segment.trainable else 0)

    def _flow(self, what: str, of: str | int, m: int) -> Content:
        return Content(what, of, m, self.now.number)

    def _loss_of(self, m: int) -> Content:
        return self._flow("loss", "", m)

    def _sum(self, of: str, count: int) -> Content:
        return Content("gradient", of, when=self.now.step, count=count)

    def _complete(self, segment: SegmentPlan, step: int, num_micro_batches: int) -> Content:
        merged = self.has_tied_grad and segment.kind == "embed"
        return Content("merged gradient" if merged else "gradient", segment.name, None, step, num_micro_batches)

    # needs: contents with the places where they may be ---------------------------------------------------------------

    def _weights_in_slot(self, segment: SegmentPlan) -> Wanted:
        return self.weight_places[segment.name], self.weights(segment, self.now.computed_with)

    def _flow_in_place(self, what: str, of: str | int, m: int) -> Wanted:
        if what == "act" and of in self.offloaded:
            return {Place("h", slot, m) for slot in range(self.plan.act_slots)}, self._flow(what, of, m)
        place = Place(what, of, m) if what in ("act", "kept", "attn") else Place(what, "", m)
        return (place,), self._flow(what, of, m)

    def _sum_in_slot(self, segment: SegmentPlan, count: int) -> list[Wanted]:
        return [(self.grad_places[segment.name], self._sum(segment.name, count))] if segment.trainable else []

    def _tied_sum(self, count: int) -> list[Wanted]:
        return [((TIED_GRAD,), self._sum("tied.grad", count))] if self.has_tied_grad else []

    def _weights_in_reach(self, segment: SegmentPlan, after: int | None = None) -> Wanted:
        """The weights where an update, a FETCH or a SAVE finds them: at home, or landed from disk."""
        on_disk = segment.weights_home == "disk"
        return self.landing["land.w"] if on_disk else {self.homes(segment).weights}, self.weights(segment, after)

    def _state_in_reach(self, segment: SegmentPlan, after: int | None = None) -> Wanted:
        on_disk = segment.state == "disk"
        return self.landing["land.state"] if on_disk else {self.homes(segment).state}, self.state(segment, after)

    def _grads_in_reach(self, segment: SegmentPlan) -> Collection[Place]:
        """Where an update at home finds the gradient: in its slot, in RAM, or landed if it has no home."""
        if segment.state == "hbm":
            return self.grad_places[segment.name]
        return self.landing["land.grad"] if self.two_pass else {self.homes(segment).grad}

    def _load(self, kind: Kind, segment: SegmentPlan, found: Content | None) -> Need:
        """A copy of what is on disk, before or after its update: whoever reads it says which one is wanted."""
        tier = segment.weights_home if kind is Kind.LOAD else segment.state
        if tier != "disk":
            raise Fault(f"{kind} of {segment.name}, which lives in {tier}")
        home = self.homes(segment).weights if kind is Kind.LOAD else self.homes(segment).state
        in_reach = self._weights_in_reach if kind is Kind.LOAD else self._state_in_reach
        slots, content = in_reach(segment, self.now.settled - 1)
        if content != found:
            slots, content = in_reach(segment)
        return Need([((home,), content)], [(slots, content)])

    def _spill(self, segment: SegmentPlan, found: Content | None) -> Need:
        """What was updated in this program or, of a step in two passes, in the one before."""
        reads, writes = [], []
        if segment.state == "disk":
            state = self.state(segment)
            if found == self.state(segment, self.now.computed_with):
                state = found
            reads.append((self._state_in_reach(segment)[0], state))
            writes.append(((self.homes(segment).state,), state))
        if segment.weights_home == "disk":
            reads.append(self._weights_in_reach(segment))
            writes.append(((self.homes(segment).weights,), self.weights(segment)))
        if not reads:
            raise Fault(f"nothing of {segment.name} lives on disk")
        return Need(reads, writes)

    def _fetch(self, segment: SegmentPlan, found: Content | None) -> Need:
        """The weights that pass through the layers or, for an update on the device, those before it."""
        if segment.state == "hbm":
            raise Fault(f"the weights of {segment.name} never leave HBM")
        home, content = self._weights_in_reach(segment, self.now.computed_with)
        if self._passes(segment) and found == self.weights(segment, self.now.settled - 1):
            content = found
        return Need([(home, content)], [(self.weight_places[segment.name], content)])

    def _fetch_state(self, segment: SegmentPlan) -> Need:
        if not self._passes(segment):
            raise Fault(f"the state of {segment.name} never leaves its home")
        state = self.state(segment, self.now.settled - 1)
        return Need([((self.homes(segment).state,), state)], [(self.state_slots, state)])

    def _move_grad(self, kind: Kind, segment: SegmentPlan, found: Content | None) -> Need:
        """FETCH_GRAD and DRAIN carry a sum however far it is: what counts is whose it is, and BACKWARD counts on; or
        the one that an update waits for."""
        if segment.state == "hbm":
            raise Fault(f"the gradient of {segment.name} never leaves HBM")
        pending = self._complete(segment, self.now.settled, self.now.settled_micro_batches)
        if kind is Kind.FETCH_GRAD and self._passes(segment) and found == pending:
            content = pending
        elif segment.grads == "own":
            content = self._complete(segment, self.now.step, self.now.num_micro_batches)
        else:
            content = self._sum(segment.name, found.count if found is not None and found.count else 1)
        home = (self._grads_in_reach(segment), content)
        slot = (self.grad_places[segment.name], content)
        return Need([home], [slot]) if kind is Kind.FETCH_GRAD else Need([slot], [home])

    def _zero(self, segment: SegmentPlan, writes: tuple[Place, ...]) -> Need:
        if writes == (TIED_GRAD,) and segment.kind == "embed":
            return Need([], self._tied_sum(0))
        return Need([], self._sum_in_slot(segment, 0))

    def _embed(self, segment: SegmentPlan, m: int) -> Need:
        writes = [self._flow_in_place("act", 0, m), self._flow_in_place("call", "", m)]
        return Need([self._weights_in_slot(segment)], writes)

    def _inputs(self, segment: SegmentPlan, m: int) -> list[Wanted]:
        block = self.number_of[segment.name] - 1
        flow = [self._flow_in_place("act", block, m), self._flow_in_place("call", "", m)]
        return [self._weights_in_slot(segment), *flow]

    def _kept(self, segment: SegmentPlan, m: int) -> list[Wanted]:
        number = self.number_of[segment.name]
        if self.now.program == "eval" or number < self.lowest:
            return []
        if segment.activations == "keep":
            return [] if self.again else [self._flow_in_place("kept", number - 1, m)]
        return [self._flow_in_place("attn", number - 1, m)] if segment.activations == "keep_attention" else []

    def _forward(self, segment: SegmentPlan, m: int) -> Need:
        output = self._flow_in_place("act", self.number_of[segment.name], m)
        return Need(self._inputs(segment, m), [output, *self._kept(segment, m)])

    def _offload(self, segment: SegmentPlan, m: int) -> Need:
        block = self.number_of[segment.name] - 1
        if block not in self.waiting_in_ram:
            raise Fault(f"the input of {segment.name} never leaves HBM")
        slot = self._flow_in_place("act", block, m)
        return Need([slot], [((Place("ram.act", block, m),), slot[1])])

    def _reload(self, segment: SegmentPlan, m: int) -> Need:
        slots, homes = self._offload(segment, m)
        return Need(homes, slots)

    def _loss(self, segment: SegmentPlan, m: int) -> Need:
        tied = [self._weights_in_slot(self.plan.segments[0])] if self.plan.tied else []
        hidden = self._flow_in_place("act", self.number_of[segment.name] - 1, m)
        return Need([self._weights_in_slot(segment), *tied, hidden], [((Place("loss", "", m),), self._loss_of(m))])

    def _head(self, segment: SegmentPlan, m: int) -> Need:
        reads, loss = self._loss(segment, m)
        dact = self._flow_in_place("dact", self.number_of[segment.name] - 1, m)
        before = self._sum_in_slot(segment, m) + self._tied_sum(m)
        after = self._sum_in_slot(segment, m + 1) + self._tied_sum(m + 1)
        return Need(reads + before, [dact, *([] if self.again else loss), *after])

    def _backward(self, segment: SegmentPlan, m: int) -> Need:
        number = self.number_of[segment.name]
        if number < self.lowest:
            raise Fault(f"nothing at or below {segment.name} is trained")
        reads = [*self._inputs(segment, m), self._flow_in_place("dact", number, m), *self._sum_in_slot(segment, m)]
        writes = [self._flow_in_place("dact", number - 1, m), *self._sum_in_slot(segment, m + 1)]
        return Need(reads + self._kept(segment, m), writes)

    def _embed_backward(self, segment: SegmentPlan, m: int) -> Need:
        reads = [self._weights_in_slot(segment), self._flow_in_place("dact", 0, m), *self._sum_in_slot(segment, m)]
        return Need(reads, self._sum_in_slot(segment, m + 1))

    def _merge(self, segment: SegmentPlan) -> Need:
        if not self.has_tied_grad:
            raise Fault("there is no tied gradient to merge")
        count = self.now.num_micro_batches
        merged = (self.grad_places[segment.name], self._complete(segment, self.now.step, count))
        return Need(self._tied_sum(count) + self._sum_in_slot(segment, count), [merged])

    def _norm(self, segment: SegmentPlan) -> Need:
        complete = self._complete(segment, self.now.step, self.now.num_micro_batches)
        return Need([(self.grad_places[segment.name], complete)], [self._norm_of(segment)])

    def _norm_of(self, segment: SegmentPlan) -> Wanted:
        return (Place("norm", segment.name),), Content("norm", segment.name, when=self.now.step)

    def _clip(self, op: Op) -> Need:
        if op.lane is not Lane.HOST or op.segment or op.micro_batch is not None:
            raise Fault("CLIP is one op on the host lane, of no segment and no micro-batch")
        losses = [((Place("loss", "", m),), self._loss_of(m)) for m in range(self.now.num_micro_batches)]
        return Need([*map(self._norm_of, self.trainable), *losses], [((CELL,), Content("cell", when=self.now.step))])

    def _update(self, segment: SegmentPlan) -> Need:
        settled = self.now.settled
        if self._passes(segment):
            states, places = self.state_slots, self.weight_places[segment.name]
            grads: Collection[Place] = self.grad_places[segment.name]
        else:
            states, places = self._state_in_reach(segment)[0], self._weights_in_reach(segment)[0]
            grads = self._grads_in_reach(segment)
        reads = [
            (grads, self._complete(segment, settled, self.now.settled_micro_batches)),
            ((CELL,), Content("cell", when=settled)),
            (states, self.state(segment, settled - 1)),
            (places, self.weights(segment, settled - 1)),
        ]
        return Need(reads, [(states, self.state(segment)), (places, self.weights(segment))])

    def _store(self, segment: SegmentPlan) -> Need:
        if not self._passes(segment):
            raise Fault(f"{segment.name} is updated in its home")
        weights = self.weights(segment)
        return Need([(self.weight_places[segment.name], weights)], [((self.homes(segment).weights,), weights)])

    def _store_state(self, segment: SegmentPlan) -> Need:
        if not self._passes(segment):
            raise Fault(f"the state of {segment.name} never leaves its home")
        state = self.state(segment)
        return Need([(self.state_slots, state)], [((self.homes(segment).state,), state)])

    def _save(self, segment: SegmentPlan) -> Need:
        reads = [self._weights_in_reach(segment)]
        if segment.trainable:
            reads.append(self._state_in_reach(segment))
        return Need(reads, [((Place("file", segment.name),), self._file(segment))])

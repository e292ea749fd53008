"""Build: from a Plan, the ops of one program in the order they are issued. Decides all order; decides no placement."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

from megatrain.errors import PlanError
from megatrain.schedule.landing import Landing
from megatrain.schedule.ops import CELL, TIED_GRAD, Kind, Lane, Op, Place, Program, Schedule
from megatrain.schedule.plan import Plan, SegmentPlan, validate
from megatrain.schedule.slots import GradSlots, InputSlots, PassingStates, Visit, VisitKind, WeightSlots, kept_places
from megatrain.schedule.waits import with_waits


def build(plan: Plan, program: Program, num_micro_batches: int, pending_update: bool) -> Schedule:
    """The schedule of one program, waits included. It starts and ends with all lanes idle.

    `pending_update`: the step before has not been applied yet; this program applies it, whatever the program is.
    "train" leaves its own update pending; in two passes it leaves no more than states on their way to the disk.
    `num_micro_batches` (of the step; unused by flush and save) goes through the layers in rounds of nearly equal size.
    """
    validate(plan)
    two_pass = plan.clip_mode == "two-pass"
    if program in ("train", "eval"):
        assert num_micro_batches >= 1, f"{program} with {num_micro_batches} micro-batches"
        if program == "train" and two_pass and num_micro_batches > plan.round_micro_batches:
            raise PlanError(
                f"a step has {num_micro_batches} micro-batches and a round {plan.round_micro_batches}, but in two "
                "passes gradients have no home between rounds; use clip_mode deferred, or a round of the whole step"
            )
        if program != "eval" and plan.lowest_trainable == len(plan.segments):
            raise PlanError("every segment is frozen: there is nothing to train; unfreeze a tensor, or evaluate")
        ops = _Pass(plan, program, num_micro_batches, pending_update).ops()
    else:
        ops = _at_home(plan, program, pending_update)
    return with_waits(tuple(ops))


def rounds(num_micro_batches: int, round_micro_batches: int) -> tuple[range, ...]:
    """Micro-batches 0 … in the fewest rounds of at most `round_micro_batches`, sizes differing by at most one.

    Nearly equal rounds, not full ones and a rest: a short round hides less traffic behind its compute.
    """
    num_rounds = -(-num_micro_batches // round_micro_batches)
    edges = [num_micro_batches * r // num_rounds for r in range(num_rounds + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(edges))


def _update(segment: SegmentPlan, landing: Landing, slot: Place | None = None) -> Iterator[Op]:
    """The update of a segment where it lives, and from and to the disk the way there and back. `slot`: of its gradient,
    if it lives in HBM and has none of its own."""
    if segment.state == "hbm":
        grad = slot or Place("g", segment.name)
        yield _update_on_device(segment.name, grad, Place("hbm.state", segment.name), Place("w", segment.name))
        return
    yield from landing.bring_state(segment)
    yield from landing.bring_weights(segment)
    changed = (landing.state(segment), landing.weights(segment))
    yield Op(Kind.UPDATE, segment.name, None, Lane.HOST, (landing.grad(segment), CELL, *changed), changed)
    yield from landing.spill(segment)


def _update_on_device(name: str, grad: Place, *changed: Place) -> Op:
    return Op(Kind.UPDATE, name, None, Lane.COMPUTE, (grad, CELL, *changed), changed)


def _at_home(plan: Plan, program: Program, pending_update: bool) -> Iterator[Op]:
    """flush and save: nothing passes through the layers."""
    landing = Landing(plan, pending_update)
    if pending_update:
        yield from landing.late_spills()
    for segment in plan.segments:
        if pending_update and segment.trainable and plan.clip_mode == "deferred":
            yield from _update(segment, landing)
        if program == "save":
            yield from landing.bring_weights(segment)
            reads = [landing.weights(segment)]
            if segment.trainable:
                yield from landing.bring_state(segment)
                reads.append(landing.state(segment))
            yield Op(Kind.SAVE, segment.name, None, Lane.DISK, tuple(reads), (Place("file", segment.name),))


class _Pass:
    """Writes the ops of train or eval, visit by visit."""

    def __init__(self, plan: Plan, program: Program, num_micro_batches: int, pending_update: bool) -> None:
        self.plan = plan
        self.program = program
        self.train = program != "eval"  # there is a backward pass
        self.num_micro_batches = num_micro_batches
        self.two_pass = plan.clip_mode == "two-pass"
        self.pending_spills = pending_update and self.two_pass
        self.pending_update = pending_update and not self.two_pass
        self.segment_of = {segment.name: segment for segment in plan.segments}
        self.landing = Landing(plan, pending_update)
        # In order of first use: the host works through them while the first layers already compute.
        away = [s for s in plan.segments if s.trainable and s.state != "hbm"]
        on_host = [s for s in away if not (self.train and s.streams_state)]
        self.host_updates = deque(on_host if self.pending_update else ())
        self.lowest = plan.lowest_trainable if self.train else len(plan.segments)
        self.embed, self.head = plan.segments[0], plan.segments[-1]
        self.visits = tuple(self._visits())
        self.weights = WeightSlots(plan, self.visits)
        self.passing = PassingStates(plan, self.visits if self.train and self.pending_update else ())
        self.grads = GradSlots(plan, self.visits if self.train else ())
        self.inputs = InputSlots(plan)
        self.tied_grad = (TIED_GRAD,) if self.train and plan.has_tied_grad else ()

    def _visits(self) -> Iterator[Visit]:
        num_blocks = len(self.plan.blocks)
        parts = rounds(self.num_micro_batches, self.plan.round_micro_batches)
        there: list[tuple[VisitKind, int]] = [("embed", 0)]
        there += [("forward", index) for index in range(1, num_blocks + 1)]
        back: list[tuple[VisitKind, int]] = [("head", num_blocks + 1)]
        back += [("backward", index) for index in range(num_blocks, max(self.lowest, 1) - 1, -1)]
        if self.lowest == 0:
            back += [("embed_backward", 0)]
        way = list(product(parts, there + back))
        for number, (part, (kind, index)) in enumerate(way):
            yield Visit(number, kind, index, part, part == parts[0], part == parts[-1])
        if self.train and self.two_pass:  # the inputs of all layers are still there: no second forward
            for number, (kind, index) in enumerate(back, start=len(way)):
                yield Visit(number, kind, index, parts[0], True, True, again=True)

    def ops(self) -> Iterator[Op]:
        if self.pending_spills:
            yield from self.landing.late_spills()
        while self.host_updates and not self.host_updates[0].weights_on_disk:
            yield from _update(self.host_updates.popleft(), self.landing)
        yield from self._fetches(-1)
        write = {
            "embed": self._embed,
            "forward": self._forward,
            "head": self._head,
            "backward": self._backward,
            "embed_backward": self._embed_backward,
        }
        last_for_norm = max(visit.number for visit in self.visits if not visit.again)
        for visit in self.visits:
            segment = self.plan.segments[visit.index]
            if self.pending_update and visit.is_first_use and segment.trainable and segment.state == "hbm":
                yield from _update(segment, self.landing)
            yield from self._passing_update(visit, segment)
            yield from write[visit.kind](visit, segment)
            yield from self._fetches(visit.number)
            if visit.number == last_for_norm and self.train:
                norms = tuple(Place("norm", s.name) for s in self.plan.segments if s.trainable)
                losses = tuple(Place("loss", "", m) for m in range(self.num_micro_batches))
                yield Op(Kind.CLIP, "", None, Lane.HOST, (*norms, *losses), (CELL,))

    def _fetches(self, done: int) -> Iterator[Op]:
        fetches = self.weights.fetch_after(done) + self.grads.fetch_after(done) + self.passing.fetch_after(done)
        for _, op in sorted(fetches, key=lambda fetch: fetch[0]):
            yield from self._fetch_weights(op) if op.kind is Kind.FETCH else (op,)

    def _fetch_weights(self, op: Op) -> Iterator[Op]:
        """A FETCH; what lives on disk lands first, and is fetched from where it was updated, not read again."""
        if self.host_updates and self.host_updates[0].name == op.segment:
            yield from _update(self.host_updates.popleft(), self.landing)
        segment = self.segment_of[op.segment]
        yield from self.landing.bring_weights(segment)
        yield replace(op, reads=(self.landing.weights(segment),))

    def _passing_update(self, visit: Visit, segment: SegmentPlan) -> Iterator[Op]:
        """The update of a segment whose state passes through a slot, and the way home of what it changed."""
        slots = self.passing.slots_of(visit)
        if slots is not None:
            name, (grad, state), weights = segment.name, slots, self.weights[segment.name]
            yield _update_on_device(name, grad, state, weights)
            # Weights first: others wait for their slot.
            yield Op(Kind.STORE, name, None, Lane.D2H, (weights,), (Place("ram.w", name),))
            yield Op(Kind.STORE_STATE, name, None, Lane.D2H, (state,), (Place("ram.state", name),))

    def _embed(self, visit: Visit, segment: SegmentPlan) -> Iterator[Op]:
        for m in visit.micro_batches:
            writes = (self.inputs.place(0, m), Place("call", "", m))
            yield Op(Kind.EMBED, segment.name, m, Lane.COMPUTE, (self.weights[segment.name],), writes)

    def _forward(self, visit: Visit, segment: SegmentPlan) -> Iterator[Op]:
        block = visit.index - 1
        keeps = visit.index >= self.lowest
        for m in visit.micro_batches:
            source, target = self.inputs.place(block, m), self.inputs.place(block + 1, m)
            reads = (self.weights[segment.name], source, Place("call", "", m))
            kept = kept_places(segment, block, m) if keeps else ()
            yield Op(Kind.FORWARD, segment.name, m, Lane.COMPUTE, reads, (target, *kept))
            if self.train and self.inputs.waits_in_ram(block):
                yield Op(Kind.OFFLOAD, segment.name, m, Lane.D2H, (source,), (Place("ram.act", block, m),))

    def _head(self, visit: Visit, segment: SegmentPlan) -> Iterator[Op]:
        tied_weights = (self.weights[self.embed.name],) if self.plan.tied else ()
        sums = (*self.grads[visit], *self.tied_grad)
        if visit.first_round:
            yield from (self._zero(segment, place) for place in self.grads[visit])
            yield from (self._zero(self.embed, place) for place in self.tied_grad)
        for m in visit.micro_batches:
            reads = (self.weights[segment.name], *tied_weights, self.inputs.place(visit.index - 1, m))
            loss = Place("loss", "", m)
            if self.train:
                writes = (Place("dact", "", m), *(() if visit.again else (loss,)), *sums)
                yield Op(Kind.HEAD, segment.name, m, Lane.COMPUTE, (*reads, *sums), writes)
            else:
                yield Op(Kind.LOSS, segment.name, m, Lane.COMPUTE, reads, (loss,))
        yield from self._finish(visit, segment)

    def _backward(self, visit: Visit, segment: SegmentPlan) -> Iterator[Op]:
        block, grad = visit.index - 1, self.grads[visit]
        if visit.first_round:
            yield from (self._zero(segment, place) for place in grad)
        for m in visit.micro_batches:
            dact, call = Place("dact", "", m), Place("call", "", m)
            used_up = visit.again and segment.activations == "keep"  # a graph serves one backward
            kept = () if used_up else kept_places(segment, block, m)
            source = self.inputs.place(block, m)
            reads = (self.weights[segment.name], source, call, dact, *grad, *kept)
            yield Op(Kind.BACKWARD, segment.name, m, Lane.COMPUTE, reads, (dact, *grad))
            next_in = self.inputs.freed_for(block, visit.again or not self.two_pass)
            if next_in is not None:
                name = self.plan.blocks[next_in].name
                yield Op(Kind.RELOAD, name, m, Lane.H2D, (Place("ram.act", next_in, m),), (source,))
        yield from self._finish(visit, segment)

    def _embed_backward(self, visit: Visit, segment: SegmentPlan) -> Iterator[Op]:
        grad = self.grads[visit]
        if visit.first_round:
            yield from (self._zero(segment, place) for place in grad)
        for m in visit.micro_batches:
            reads = (self.weights[segment.name], Place("dact", "", m), *grad)
            yield Op(Kind.EMBED_BACKWARD, segment.name, m, Lane.COMPUTE, reads, grad)
        if visit.last_round and self.tied_grad:
            yield Op(Kind.MERGE, segment.name, None, Lane.COMPUTE, (TIED_GRAD, *grad), grad)
        yield from self._finish(visit, segment)

    def _zero(self, segment: SegmentPlan, place: Place) -> Op:
        return Op(Kind.ZERO, segment.name, None, Lane.COMPUTE, (), (place,))

    def _finish(self, visit: Visit, segment: SegmentPlan) -> Iterator[Op]:
        """After the last micro-batch of a visit: the norm of a complete gradient, and its way home."""
        for grad in self.grads[visit]:
            if visit.last_round and not visit.again:
                yield Op(Kind.NORM, segment.name, None, Lane.COMPUTE, (grad,), (Place("norm", segment.name),))
            if self.grads.leaves_after(visit):
                yield Op(Kind.DRAIN, segment.name, None, Lane.D2H, (grad,), (self.landing.way_of_grad(segment),))
            if visit.again:
                yield from _update(segment, self.landing, grad)

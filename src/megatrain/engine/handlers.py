"""Handlers: what each op kind does. Each reads and writes exactly the places its op names.

Legend: T tokens of a micro-batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megatrain import optim
from megatrain.engine.places import Places
from megatrain.engine.rules import Rule, trainable_entries
from megatrain.engine.scalars import Scalars
from megatrain.memory import copy_in_pieces
from megatrain.models.attention import Attended
from megatrain.models.batch import TokenBatch
from megatrain.models.grad import Kept, block_backward, block_backward_kept, block_keep, embed_backward
from megatrain.models.loss import head_backward, head_loss
from megatrain.models.router import Tally
from megatrain.models.template import LayerCalls, ModelTemplate
from megatrain.schedule.ops import TIED_GRAD, Kind, Op, Place
from megatrain.store.store import SegmentStore
from megatrain.store.waiting import WaitingInputs


@dataclass(frozen=True)
class Cell:
    """What CLIP decided and UPDATE obeys. `scalars` None: skip, nothing may change."""

    norm: float
    loss_sum: float
    scalars: optim.Scalars | None
    bad_tensor: str | None  # the first tensor, in checkpoint-name order, whose gradient is not finite

    @property
    def applies(self) -> bool:
        """Whether the step changes anything."""
        return self.scalars is not None


KeyOf = Callable[[int], int | None]  # the number of a micro-batch -> what its random numbers are drawn from
Disturb = Callable[[Tensor, TokenBatch, int], Tensor]  # (h_1TD, its micro-batch, the number of that) -> h_1TD


def undisturbed(h_1TD: Tensor, _batch: TokenBatch, _micro_batch: int) -> Tensor:
    """No noise on what enters the first layer."""
    return h_1TD


def without_key(_micro_batch: int) -> None:
    """Evaluation: no dropout, no router loss."""


@dataclass
class Step:
    """One program's own data: its micro-batches, and what the ops leave for one another and for the caller."""

    micro_batches: Sequence[TokenBatch] = ()
    inv_denominator: float = 0.0
    hyper: optim.AdamW | None = None
    next_step: int = 1  # the 1-based count of applied updates if this step applies
    max_norm: float | None = None
    write_segment: Callable[[str], None] | None = None
    calls: dict[int, LayerCalls] = field(default_factory=dict)
    tallies: dict[int, Tally] = field(default_factory=dict)  # of micro-batches whose routers have a loss
    kept: dict[tuple[str, int], Kept] = field(default_factory=dict)
    disturb: Disturb = undisturbed
    key_of: KeyOf = without_key
    last_calls: frozenset[int] = frozenset()  # ids of the ops after which nobody needs their micro-batch's calls


class Handlers:
    """The dispatch table and what its entries need. `step` and `cell` are set by the engine before each program."""

    def __init__(
        self,
        template: ModelTemplate,
        store: SegmentStore,
        places: Places,
        waiting: WaitingInputs,
        host_rule: Rule,
        device_rule: Rule,
        loss_chunk_tokens: int,
        label_smoothing: float,
    ) -> None:
        self.template = template
        self.store = store
        self.places = places
        self.waiting = waiting
        self.host_rule = host_rule
        self.device_rule = device_rule
        self.loss_chunk_tokens = loss_chunk_tokens
        self.label_smoothing = label_smoothing
        self.step = Step()
        self.cell: Cell | None = None
        # Segments updated since they were last spilled. The cell cannot say: a SPILL may still be on its way when the
        # next step is decided.
        self._changed: set[str] = set()
        self.scalars = Scalars()
        self.block_index = {segment.name: i for i, segment in enumerate(template.spec.blocks)}
        self.table: dict[Kind, Callable[[Op], None]] = {
            Kind.FETCH: self.move_weights,
            Kind.FETCH_STATE: self.move_state,
            Kind.FETCH_GRAD: self.fetch_grad,
            Kind.ZERO: self.zero,
            Kind.EMBED: self.embed,
            Kind.FORWARD: self.forward,
            Kind.OFFLOAD: self.offload,
            Kind.RELOAD: self.reload,
            Kind.HEAD: self.head,
            Kind.LOSS: self.loss,
            Kind.BACKWARD: self.backward,
            Kind.EMBED_BACKWARD: self.embed_backward,
            Kind.MERGE: self.merge,
            Kind.NORM: self.norm,
            Kind.DRAIN: self.drain,
            Kind.CLIP: self.clip,
            Kind.UPDATE: self.update,
            Kind.STORE: self.move_weights,
            Kind.STORE_STATE: self.move_state,
            Kind.LOAD: self.load,
            Kind.LOAD_STATE: self.load,
            Kind.SPILL: self.spill,
            Kind.SAVE: self.save,
        }

    # --- travel ------------------------------------------------------------------------------------------------
    def move_weights(self, op: Op) -> None:
        copy_in_pieces(self.places.flat(op.writes[0], op.segment), self.places.flat(op.reads[0], op.segment))

    def load(self, op: Op) -> None:
        self.store.load(op.segment, self.places.landing_slots(op.writes))

    def spill(self, op: Op) -> None:
        if op.segment not in self._changed:
            return  # a skipped step changed nothing: the drive keeps what it has, and is spared
        self._changed.discard(op.segment)
        self.store.spill(op.segment, self.places.landing_slots(op.reads))

    def move_state(self, op: Op) -> None:
        source = self.places.state(op.reads[0], op.segment)
        for kind, target in self.places.state(op.writes[0], op.segment).items():
            copy_in_pieces(target, source[kind])

    def fetch_grad(self, op: Op) -> None:
        copy_in_pieces(self.places.flat(op.writes[0], op.segment), self.store.flat(op.segment, "grad"))

    def drain(self, op: Op) -> None:
        copy_in_pieces(self._gradient(op.writes[0], op.segment), self.places.flat(op.reads[0], op.segment))

    def _gradient(self, place: Place, segment: str) -> Tensor:
        """A gradient in RAM: at home, or in a landing slot."""
        if place.pool == "land.grad":
            return self.store.landed_grad(segment, int(place.key))
        return self.store.flat(segment, "grad")

    def zero(self, op: Op) -> None:
        place = op.writes[0]
        target = self.places.tied_grad() if place == TIED_GRAD else self.places.flat(place, op.segment)
        target.zero_()

    # --- forward -----------------------------------------------------------------------------------------------
    def _batch(self, op: Op) -> tuple[int, TokenBatch]:
        assert op.micro_batch is not None
        return op.micro_batch, self.step.micro_batches[op.micro_batch]

    def embed(self, op: Op) -> None:
        m, batch = self._batch(op)
        h, calls = self.template.embed(self.places.views(op.reads[0], op.segment), batch, self.step.key_of(m))
        self.places.hidden(op.writes[0]).copy_(self.step.disturb(h, batch, m))
        self.step.calls[m] = calls
        if calls[0].tally is not None:
            self.step.tallies[m] = calls[0].tally

    def forward(self, op: Op) -> None:
        m, _ = self._batch(op)
        weights = self.places.views(op.reads[0], op.segment)
        index, h, calls = self.block_index[op.segment], self.places.hidden(op.reads[1]), self.step.calls[m]
        if any(place.pool == "kept" for place in op.writes):
            out, self.step.kept[op.segment, m] = block_keep(self.template, index, weights, h, calls)
        else:
            out = self.template.block(index, weights, h, calls, self._attended(op.writes))
        self.places.hidden(op.writes[0]).copy_(out.detach())
        self._release(op)

    def _attended(self, places: Sequence[Place]) -> Attended | None:
        """The place where what the attention gives is kept, if it is."""
        return next((self.places.attended(place) for place in places if place.pool == "attn"), None)

    def offload(self, op: Op) -> None:
        copy_in_pieces(self._waiting(op.writes[0]), self.places.hidden(op.reads[0]).flatten())

    def reload(self, op: Op) -> None:
        copy_in_pieces(self.places.hidden(op.writes[0]).flatten(), self._waiting(op.reads[0]))

    def _waiting(self, place: Place) -> Tensor:
        assert place.micro_batch is not None
        return self.waiting.flat(int(place.key), place.micro_batch)

    def _release(self, op: Op) -> None:
        """Drop the layer calls (rotary tables, masks) if `op` is the last to use them."""
        if id(op) in self.step.last_calls:
            del self.step.calls[self._batch(op)[0]]

    def _head(self, op: Op) -> tuple[TokenBatch, dict[str, Tensor], Tensor]:
        _, batch = self._batch(op)
        weights = self.places.views(op.reads[0], op.segment)
        if self.places.tied is not None:
            embedding = self.places.views(op.reads[1], "EMBED")[self.places.tied.tensor.local]
            weights = weights | {"lm_head.weight": embedding}
        return batch, weights, self.places.hidden(_one(op.reads, "act"))

    def head(self, op: Op) -> None:
        m, _ = self._batch(op)
        batch, weights, h = self._head(op)
        grads: dict[str, Tensor] = {}
        for place in op.writes:
            if place == TIED_GRAD:
                grads["lm_head.weight"] = self.places.tied_grad()
            elif place.pool == "g":
                grads |= self.places.views(place, op.segment)
        loss, dh = head_backward(
            self.template,
            weights,
            grads,
            h,
            batch.labels_T,
            self.step.inv_denominator,
            self.loss_chunk_tokens,
            self.label_smoothing,
        )
        for place in op.writes:
            if place.pool == "loss":  # in a second pass it is known, and so is what the routers get
                if self.template.balance is not None:
                    loss = loss + self.step.tallies[m].settle(self.template.balance, self.step.inv_denominator)
                self.scalars.put(str(place), loss)
        self.places.hidden(_one(op.writes, "dact")).copy_(dh)

    def loss(self, op: Op) -> None:
        batch, weights, h = self._head(op)
        loss = head_loss(self.template, weights, h, batch.labels_T, self.loss_chunk_tokens)
        self.scalars.put(str(op.writes[0]), loss)

    # --- backward ----------------------------------------------------------------------------------------------
    def _grads(self, op: Op) -> dict[str, Tensor]:
        slots = [place for place in op.writes if place.pool == "g"]
        return self.places.views(slots[0], op.segment) if slots else {}

    def backward(self, op: Op) -> None:
        m, _ = self._batch(op)
        weights, grads = self.places.views(op.reads[0], op.segment), self._grads(op)
        dh = self.places.hidden(_one(op.writes, "dact"))
        kept = self.step.kept.pop((op.segment, m), None)
        if kept is not None:
            dx = block_backward_kept(kept, weights, grads, dh)
        else:
            index, h = self.block_index[op.segment], self.places.hidden(op.reads[1])
            attended = self._attended(op.reads)
            dx = block_backward(self.template, index, weights, grads, h, self.step.calls[m], dh, attended)
        dh.copy_(dx)
        self._release(op)

    def embed_backward(self, op: Op) -> None:
        m, batch = self._batch(op)
        weights, dh = self.places.views(op.reads[0], op.segment), self.places.hidden(_one(op.reads, "dact"))
        embed_backward(self.template, weights, self._grads(op), batch, dh, self.step.key_of(m))

    def merge(self, op: Op) -> None:
        assert self.places.tied is not None
        self.places.views(op.writes[0], op.segment)[self.places.tied.tensor.local].add_(self.places.tied_grad())

    # --- update ------------------------------------------------------------------------------------------------
    def norm(self, op: Op) -> None:
        layout = self.store.layouts[op.segment]
        self.scalars.put(str(op.writes[0]), self.device_rule.sums(layout, self.places.flat(op.reads[0], op.segment)))

    def clip(self, op: Op) -> None:
        assert self.step.hyper is not None
        sums: dict[str, float] = {}
        loss_sum = 0.0
        for place, values in zip(op.reads, self.scalars.get([str(place) for place in op.reads]), strict=True):
            if place.pool == "loss":
                loss_sum += values[0]
            else:
                names = [entry.tensor.name for entry in trainable_entries(self.store.layouts[str(place.key)])]
                sums |= zip(names, values, strict=True)
        names = sorted(sums)
        norm = optim.total_norm([sums[name] for name in names])
        finite = bool(np.isfinite(norm) and np.isfinite(loss_sum))
        scalars = None
        if finite:
            coefficient = optim.clip_coefficient(norm, self.step.max_norm)
            scalars = optim.scalars(self.step.hyper, self.step.next_step, coefficient)
        bad = next((name for name in names if not np.isfinite(sums[name])), None)
        self.cell = Cell(norm, loss_sum, scalars, bad)

    def update(self, op: Op) -> None:
        assert self.cell is not None
        if self.cell.scalars is None:
            return
        self._changed.add(op.segment)
        layout = self.store.layouts[op.segment]
        gradient, _, state_place, weights = op.reads
        state, w = self.places.state(state_place, op.segment), self.places.flat(weights, op.segment)
        if gradient.pool == "g":
            rule, g = self.device_rule, self.places.flat(gradient, op.segment)
        else:
            rule, g = self.host_rule, self._gradient(gradient, op.segment)
        rule.update(layout, w, state, g, self.cell.scalars)

    def save(self, op: Op) -> None:
        assert self.step.write_segment is not None
        with self.store.at(op.segment, self.places.landing_slots(op.reads)):
            self.step.write_segment(op.segment)


def _one(places: Sequence[Place], pool: str) -> Place:
    """The only place of `pool` among `places`."""
    (place,) = (place for place in places if place.pool == pool)
    return place

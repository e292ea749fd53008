"""Plan: where every byte lives and what is recomputed. Placement only: no field may change a bit of the result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from megatrain.errors import PlanError

Tier = Literal["hbm", "ram", "disk"]
Activations = Literal["recompute", "keep_attention", "keep", "offload"]


@dataclass(frozen=True)
class SegmentPlan:
    """Placement of one segment.

    `weights`: "pool" (fetched into a shared slot at each visit), or "own" (a slot of its own: fetched once after
    each update, or never if `state` is "hbm").  EMBED and HEAD are always "own".
    `grads`: "pool" (summed in a shared slot, drained to the gradient home in RAM at the end of each visit), or "own"
    (stays in HBM over all rounds; drained once if the update runs on the host lane).
    `state`: home of lo, m, v: "hbm" (needs weights "own", and grads too unless a step goes in two passes), "ram" or
    "disk".
    `update`: where the update runs: "home" (on the compute lane if `state` is "hbm", else on the host lane),
    or "device" (`state` "ram"): on the compute lane, right before the next step first uses the segment, with gradient
    and state from RAM in shared slots; new state and weights are written back to RAM behind it. Between programs it is
    as any other in RAM, so an update that another program has to do runs on the host lane.
    `weights_home`: where the weights live between uses, unless `state` is "hbm": "ram" or "disk".
    `activations`: "recompute" keeps only the block's input; "keep_attention" keeps what its attention gives, too, so
    that the recomputation does not attend again; "keep" keeps autograd's saved tensors; "offload" lets the input wait
    in RAM for the backward pass, in `act_slots` shared slots on its way.
    """

    name: str
    kind: Literal["embed", "block", "head"]
    trainable: bool  # False: no state, no gradient, no update; gradients still flow through
    weights: Literal["pool", "own"] = "pool"
    grads: Literal["pool", "own"] = "pool"
    state: Tier = "ram"
    activations: Activations = "recompute"
    update: Literal["home", "device"] = "home"
    weights_home: Literal["ram", "disk"] = "ram"

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, *self.placement))

    def __hash__(self) -> int:  # kept: the planner looks up the same few segments a million times
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:  # without the hash, which is of this process alone
        return SegmentPlan, (self.name, *self.placement)

    @cached_property
    def placement(self) -> tuple[object, ...]:
        """All but the name: what blocks that are placed alike have in common."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name != "name")

    @property
    def streams_state(self) -> bool:
        """Whether a step brings gradient and state from RAM to the device, updates there, and takes state back."""
        return self.trainable and self.update == "device"

    @property
    def state_on_disk(self) -> bool:
        """Whether lo, m and v live on disk."""
        return self.trainable and self.state == "disk"

    @property
    def weights_on_disk(self) -> bool:
        """Whether the weights live on disk."""
        return self.weights_home == "disk"


@dataclass(frozen=True)
class Plan:
    """The chosen placement of a run. `segments` in travel order: EMBED, L000 …, HEAD."""

    segments: tuple[SegmentPlan, ...]
    tied: bool  # HEAD multiplies by the embedding, so it reads EMBED too
    weight_slots: int  # shared slots W0 … for blocks, >= 2 when more than one block is "pool"
    grad_slots: int  # shared slots G0 …
    round_micro_batches: int  # at most this many micro-batches go through the layers together
    embedding_trainable: bool = True  # False: frozen, though other tensors of EMBED may be trained
    disk_slots: int = 0  # landing slots in RAM, for weights and for state, of segments that live on disk
    act_slots: int = 0  # shared slots H0 … for the inputs of blocks with activations "offload", >= 2 if there are any

    clip_mode: Literal["deferred", "two-pass"] = "deferred"  # two-pass: gradients have no home; see docs/schedule.md
    grad_landing_slots: int = 0  # two-pass: slots in RAM for gradients on their way to the host's updates
    state_slots: int = 0  # shared slots S0 … for the states of segments with update "device", 2 to overlap

    @cached_property
    def blocks(self) -> tuple[SegmentPlan, ...]:
        return self.segments[1:-1]

    @property
    def recomputed(self) -> tuple[bool, ...]:
        """For each block, whether the backward pass computes its forward again."""
        return tuple(block.activations != "keep" for block in self.blocks)

    @property
    def attention_kept(self) -> tuple[int, ...]:
        """Blocks (from 0) whose recomputation does not attend again."""
        return tuple(i for i, block in enumerate(self.blocks) if block.activations == "keep_attention")

    @property
    def backwards(self) -> int:
        """Backward passes of a step."""
        return 1 if self.clip_mode == "deferred" else 2

    @cached_property
    def offloaded(self) -> tuple[int, ...]:
        """Blocks (from 0) whose inputs pass through the shared slots, in order."""
        return tuple([i for i, block in enumerate(self.blocks) if block.activations == "offload"])

    @cached_property
    def waiting_in_ram(self) -> tuple[int, ...]:
        """Blocks whose inputs go to RAM and back: not those that no backward visits, nor the last ones of the others,
        which are still in their slots when the pass turns. A second pass comes back to all that share a slot."""
        visited = [i for i in self.offloaded if i + 1 >= self.lowest_trainable]
        if not visited:
            return ()
        if self.clip_mode == "deferred":
            return tuple(visited[: max(0, len(visited) - self.act_slots)])
        alone = range(max(0, len(visited) - self.act_slots), min(len(visited), self.act_slots))
        return tuple(block for turn, block in enumerate(visited) if turn not in alone)

    @property
    def spilled_late(self) -> tuple[tuple[str, int], ...]:
        """(segment, its landing slot), in order of slots, of the last updates of a step in two passes whose state is on
        disk: it stays in RAM until the next program has begun, so that the disk has work during the first pass, too.
        Not those that nothing else takes the slot from before their next update."""
        updated = [s for s in reversed(self.segments) if s.state_on_disk]
        if self.clip_mode == "deferred":
            return ()
        turns = range(max(len(updated) - self.disk_slots, self.disk_slots), len(updated))
        late = [(updated[turn].name, turn % self.disk_slots) for turn in turns if not updated[turn].weights_on_disk]
        return tuple(sorted(late, key=lambda pair: pair[1]))

    @property
    def has_tied_grad(self) -> bool:
        """Whether HEAD sums a gradient of the embedding, to be merged with EMBED's own."""
        return self.tied and self.embedding_trainable and self.segments[0].trainable

    @cached_property
    def lowest_trainable(self) -> int:
        """Index in `segments` of the first trainable one (len(segments) if none): backward stops there."""
        for index, segment in enumerate(self.segments):
            if segment.trainable:
                return index
        return len(self.segments)


def validate(plan: Plan) -> None:
    """Raise PlanError if no schedule can follow `plan`; the message names the segment or count, and the remedy."""
    names = [s.name for s in plan.segments]
    num_blocks = len(plan.segments) - 2
    wanted = ["EMBED", *(f"L{i:03d}" for i in range(num_blocks)), "HEAD"]
    if num_blocks < 1 or names != wanted:
        raise PlanError(f"plan has segments {names}; list EMBED, L000 … one a block, HEAD in travel order")
    kinds = ["embed", *["block"] * num_blocks, "head"]
    for segment, kind in zip(plan.segments, kinds, strict=True):
        _validate_segment(segment, kind, plan.clip_mode == "two-pass")
    for key in ("weight_slots", "grad_slots", "disk_slots", "act_slots", "state_slots", "grad_landing_slots"):
        slots, most = getattr(plan, key), len(plan.segments)
        if not 0 <= slots <= most:
            raise PlanError(f"{key} is {slots}; use 0 to {most}, one a segment: no more are ever in use")
    for key, least, why in _slots_needed(plan):
        if getattr(plan, key) < least:
            raise PlanError(f"{key} is {getattr(plan, key)}, but {why}")
    streamed = next((s.name for s in plan.segments if s.streams_state), None)
    if plan.clip_mode == "two-pass" and streamed is not None:
        raise PlanError(f"{streamed} has update 'device', which two passes do not know; use 'home', or state 'hbm'")
    if plan.round_micro_batches < 1:
        raise PlanError(f"round_micro_batches is {plan.round_micro_batches}; use at least 1")


def _slots_needed(plan: Plan) -> Iterator[tuple[str, int, str]]:
    """A count of slots, the least it may be, and why."""
    num_shared = sum(s.weights == "pool" for s in plan.segments)
    least = min(num_shared, 2)
    yield "weight_slots", least, f"{num_shared} segments share the slots; use at least {least} (one arrives meanwhile)"
    if any(s.trainable and s.grads == "pool" for s in plan.segments):
        yield "grad_slots", 1, "some segments share gradient slots; use at least 1"
    if plan.offloaded:
        yield "act_slots", 2, "some blocks have activations 'offload'; use at least 2 (one is read, the next written)"
    if any(s.streams_state for s in plan.segments):
        yield "state_slots", 1, "some segments have update 'device'; use at least 1 (2 to fetch and store meanwhile)"
    if any(s.state_on_disk or s.weights_on_disk for s in plan.segments):
        yield "disk_slots", 1, "some segments live on disk; use at least 1 (2 to read and write at the same time)"
    on_host = [s.name for s in plan.segments if s.trainable and s.state != "hbm"]
    if plan.clip_mode == "two-pass" and on_host:
        yield "grad_landing_slots", 1, f"in two passes the host updates {on_host[0]}; use at least 1"


def _validate_segment(segment: SegmentPlan, kind: str, two_pass: bool) -> None:
    if segment.kind != kind:
        raise PlanError(f"{segment.name} is planned as kind {segment.kind!r}; it must be {kind!r}")
    if segment.update == "device" and segment.state == "hbm":
        raise PlanError(f"{segment.name} has state 'hbm' and update 'device'; the update runs there anyway: use 'home'")
    if segment.state == "disk" and not segment.trainable:
        raise PlanError(f"{segment.name} is frozen and has no state to keep on disk; use weights_home 'disk'")
    if segment.weights_on_disk and segment.state == "hbm":
        raise PlanError(f"{segment.name} has state 'hbm' and weights_home 'disk'; its weights live in HBM: use 'ram'")
    if segment.update == "device" and (segment.state == "disk" or segment.weights_on_disk):
        # the disk is ten times slower than the host's update
        raise PlanError(f"{segment.name} lives on disk and has update 'device'; use 'home', or state 'ram'")
    if kind != "block" and segment.activations != "recompute":
        raise PlanError(
            f"{segment.name} has activations {segment.activations!r}; only blocks attend, keep activations or have an "
            "input that can wait in RAM: use 'recompute'"
        )
    if kind != "block":
        why = f"{kind} segments"
    elif segment.state == "hbm":
        why = "segments with state 'hbm'"
    else:
        return
    if segment.weights != "own":
        raise PlanError(f"{segment.name} has weights {segment.weights!r}; {why} need weights 'own'")
    uses_it_at_once = two_pass and kind == "block"  # behind its second backward: then the slot is free again
    if segment.trainable and segment.grads != "own" and not uses_it_at_once:
        raise PlanError(f"{segment.name} has grads {segment.grads!r}; {why} need grads 'own'")

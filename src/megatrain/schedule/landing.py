"""Landing: the way from disk to RAM and back, through landing slots that are taken in turn."""

from __future__ import annotations

from collections.abc import Iterator

from megatrain.schedule.ops import Kind, Lane, Op, Place
from megatrain.schedule.plan import Plan, SegmentPlan


class Landing:
    """Where weights and state of every segment are reached during a program: at home, or where they landed.

    Weights and state have slots of their own. What landed stays until the slot's turn comes again, so whoever reads it
    is listed before that: right behind the op that brought or changed it. `pending`: the program before left states
    in their slots (`Plan.spilled_late`).
    """

    def __init__(self, plan: Plan, pending: bool) -> None:
        self._num_slots = {"land.w": plan.disk_slots, "land.state": plan.disk_slots}
        self._num_slots["land.grad"] = plan.grad_landing_slots if plan.clip_mode == "two-pass" else 0
        self._taken = dict.fromkeys(self._num_slots, 0)
        self._holds: dict[Place, str] = {}  # slot -> segment
        self._late = {name: Place("land.state", slot) for name, slot in plan.spilled_late}
        if pending:
            self._holds |= {slot: name for name, slot in self._late.items()}

    def weights(self, segment: SegmentPlan) -> Place:
        """Where its weights are; on disk: where they landed."""
        if segment.weights_on_disk:
            return self._landed("land.w", segment)
        return Place("w" if segment.state == "hbm" else "ram.w", segment.name)

    def state(self, segment: SegmentPlan) -> Place:
        """Where its state is; on disk: where it landed."""
        if segment.state_on_disk:
            return self._landed("land.state", segment)
        return Place("hbm.state" if segment.state == "hbm" else "ram.state", segment.name)

    def grad(self, segment: SegmentPlan) -> Place:
        """Where its gradient is, for an update on the host: at home, or where it landed."""
        if self._num_slots["land.grad"]:
            return self._landed("land.grad", segment)
        return Place("ram.grad", segment.name)

    def way_of_grad(self, segment: SegmentPlan) -> Place:
        """Where a DRAIN takes its gradient: home, or the slot whose turn it is."""
        if self._num_slots["land.grad"]:
            return self._take("land.grad", segment)
        return Place("ram.grad", segment.name)

    def bring_weights(self, segment: SegmentPlan) -> Iterator[Op]:
        """Weights on disk land, unless they are still there."""
        if segment.weights_on_disk:
            yield from self._bring(Kind.LOAD, "disk.w", "land.w", segment)

    def bring_state(self, segment: SegmentPlan) -> Iterator[Op]:
        """State on disk lands, unless it is still there."""
        if segment.state_on_disk:
            yield from self._bring(Kind.LOAD_STATE, "disk.state", "land.state", segment)

    def spill(self, segment: SegmentPlan) -> Iterator[Op]:
        """What an update changed goes back to disk, if it lives there, and not late."""
        if segment.name in self._late:
            return
        pairs = []
        if segment.state_on_disk:
            pairs.append((self.state(segment), Place("disk.state", segment.name)))
        if segment.weights_on_disk:
            pairs.append((self.weights(segment), Place("disk.w", segment.name)))
        if pairs:
            landed, homes = zip(*pairs, strict=True)
            yield Op(Kind.SPILL, segment.name, None, Lane.DISK, landed, homes)

    def late_spills(self) -> Iterator[Op]:
        """What the last updates of the program before changed goes back to disk."""
        for name, slot in self._late.items():
            yield Op(Kind.SPILL, name, None, Lane.DISK, (slot,), (Place("disk.state", name),))

    def _bring(self, kind: Kind, home: str, pool: str, segment: SegmentPlan) -> Iterator[Op]:
        if any(place.pool == pool and name == segment.name for place, name in self._holds.items()):
            return
        slot = self._take(pool, segment)
        yield Op(kind, segment.name, None, Lane.DISK_READ, (Place(home, segment.name),), (slot,))

    def _take(self, pool: str, segment: SegmentPlan) -> Place:
        slot = Place(pool, self._taken[pool] % self._num_slots[pool])
        self._taken[pool] += 1
        self._holds[slot] = segment.name
        return slot

    def _landed(self, pool: str, segment: SegmentPlan) -> Place:
        return next(place for place, name in self._holds.items() if place.pool == pool and name == segment.name)

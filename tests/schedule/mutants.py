"""Mutants: every way to spoil one op of a schedule that the checker must notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatrain.schedule import Op, Place, Plan, Schedule
from megatrain.schedule.waits import with_waits


def dropped_waits(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    for index, op in enumerate(schedule):
        for wait in op.waits:
            mutant = replace(op, waits=tuple(w for w in op.waits if w != wait))
            yield f"op {index} without wait {wait}", (*schedule[:index], mutant, *schedule[index + 1 :])


def wrong_places(schedule: Schedule, plan: Plan) -> Iterator[tuple[str, Schedule]]:
    """Each place of each op exchanged for another of its pool: every slot, and the next neighbour in other pools."""
    slots = {"w": plan.weight_slots, "g": plan.grad_slots, "land.w": plan.disk_slots, "land.state": plan.disk_slots}
    slots["land.grad"] = plan.grad_landing_slots
    pools: dict[str, list[Place]] = {pool: [Place(pool, i) for i in range(num)] for pool, num in slots.items()}
    for op in schedule:
        for place in (*op.reads, *op.writes):
            if place not in pools.setdefault(place.pool, []):
                pools[place.pool].append(place)
    for index, op in enumerate(schedule):
        for field in ("reads", "writes"):
            places = getattr(op, field)
            for i, place in enumerate(places):
                others = [p for p in pools[place.pool] if p != place]
                if place.pool not in slots:
                    others = others[index % len(others) :][:1] if others else []
                for other in others:
                    mutant = replace(op, **{field: (*places[:i], other, *places[i + 1 :])})
                    yield f"op {index} {field} {other} for {place}", rewired(schedule, index, mutant)


def wrong_micro_batches(schedule: Schedule, num_micro_batches: int) -> Iterator[tuple[str, Schedule]]:
    """The number of the op alone, and the whole op with its places."""
    for index, op in enumerate(schedule):
        for m in range(num_micro_batches):
            if op.micro_batch not in (None, m):
                yield f"op {index} says m{m}", rewired(schedule, index, replace(op, micro_batch=m))
                reads, writes = (
                    tuple(p if p.micro_batch is None else p._replace(micro_batch=m) for p in places)
                    for places in (op.reads, op.writes)
                )
                mutant = replace(op, micro_batch=m, reads=reads, writes=writes)
                yield f"op {index} does m{m}", rewired(schedule, index, mutant)


def dropped_ops(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    for index in range(len(schedule)):
        yield f"no op {index}", with_waits((*schedule[:index], *schedule[index + 1 :]))


def doubled_ops(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Twice in a row, and once more at the end."""
    for index, op in enumerate(schedule):
        yield f"op {index} twice", with_waits((*schedule[:index], op, *schedule[index:]))
        yield f"op {index} again at the end", with_waits((*schedule, op))


def swapped_ops(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Two neighbours of one lane exchanged: with their waits as they were, and with waits made to fit."""
    last: dict[str, int] = {}
    for index, op in enumerate(schedule):
        if op.lane in last:
            before = last[op.lane]
            mutant = list(schedule)
            mutant[before], mutant[index] = op, schedule[before]
            yield f"ops {before} and {index} exchanged", tuple(mutant)
            yield f"ops {before} and {index} exchanged, waits made to fit", with_waits(mutant)
        last[op.lane] = index


def rewired(schedule: Schedule, index: int, op: Op) -> Schedule:
    """`op` at `index`, and waits made to fit: a race cannot give the mutant away, only what it computes."""
    return with_waits((*schedule[:index], op, *schedule[index + 1 :]))

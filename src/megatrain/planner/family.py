"""Family: the plans that may be chosen. No torch.

What may be chosen is a fixed family of plans that does not depend on the budgets; of those that fit, the fastest in
simulated time is taken, with wear of the disk counted as time. So more memory never gives a costlier plan: it only
adds plans to choose from. A plan of the family is a number of rounds, a number of segments (from the front, HEAD
second or last; in two passes here and there) whose state is in HBM, block inputs in HBM, in RAM, or as many in RAM as
must be, updates of what is in RAM on the host or a share of them on the device (passing.py), and one way to use what is
then left of HBM, as far as it goes: kept activations (from the last block on), or weights that stay in HBM; either at
once, or behind kept attention, which saves most time for its bytes where documents are long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Literal

from megatrain.errors import PlanError
from megatrain.models.layout import embedding_of
from megatrain.models.spec import ModelSpec
from megatrain.planner import changes
from megatrain.planner.account import Question, memory_table
from megatrain.planner.changes import Filling, changed, changed_at, steps_of
from megatrain.planner.passing import passing_share, spread, with_passing
from megatrain.planner.room import Room, border, room_bytes
from megatrain.planner.table import TIERS
from megatrain.schedule.ops import Kind, Lane, Op, Place
from megatrain.schedule.plan import Activations, Plan, SegmentPlan, Tier

ACT_SLOTS = 2  # one is computed, one travels
LANDING_SLOTS = 2  # of gradients in RAM, in two passes: one lands, one is used
# On the device. Where sums of gradients go home and come back in every round, one travels each way while one is added
# to: steps of many rounds at 120 layers are 2 to 6 % shorter (simulated).
GRAD_SLOTS = (2, 3)
# Landing slots of the disk worth trying. Each but the first puts one more state on the disk, to be read and written by
# every step: they pay where the disk would otherwise rest during the first pass or an update.
DISK_SLOTS = (1, 2, 3)
STEP = 1.2  # between two sizes of the family, beyond the first few: what it cannot use of HBM is small
SMALL_STEP = 1.05
# No step is smaller than a model's segments ÷ this: of 60 searches over 120 layers, steps of 3 gave plans of 0.982 to
# 1.004 of the seconds that steps of 2 did, in three quarters of the time.
FINEST = 40

ClipMode = Literal["deferred", "two-pass"]


def trains(spec: ModelSpec) -> bool:
    """Whether any tensor is trained; if none is, the model is only read."""
    return any(tensor.trainable for segment in spec.segments for tensor in segment.tensors)


def to_read(question: Question) -> Plan:
    """As many weights in HBM as fit, in as few rounds as fit: text is written token by token, each needs all."""
    for round_micro_batches in _round_sizes(question):
        streamed = _streamed(question, round_micro_batches, "recompute")
        order = range(len(streamed.segments)) if question.machine.device == "cuda" else ()
        has = room_bytes(question, streamed, TIERS)
        if min(has) >= 0:
            return _most(question, streamed, has, [(index, changes.RESIDENT) for index in order])[0]
    return smallest(question)


def smallest(question: Question) -> Plan:
    """The plan that leaves most room: as few micro-batches a round as allowed, and as many segments in HBM as balance
    it with RAM. PlanError if what is asked for is no plan at all."""
    plans = list(_small(question))
    if not plans:
        raise PlanError(
            f"clip_mode is two-pass, which takes the {question.num_micro_batches} micro-batches of a step in one "
            f"round, but round_micro_batches is {question.config.round_micro_batches}; leave that out, or set "
            "clip_mode to deferred"
        )
    return min(plans, key=lambda plan: memory_table(question, plan).fullest)


def could_fit(question: Question) -> bool:
    """Whether any plan is within all budgets."""
    return any(memory_table(question, plan).overall != "NO" for plan in _small(question))


def least_bytes(question: Question, tier: Tier) -> int | None:
    """What a run needs of `tier` at least, if the other tiers keep to their budgets; None if they cannot."""
    needs = []
    for plan in _small(question):
        table = memory_table(question, plan)
        if all(table.verdict(other) != "NO" for other in TIERS if other != tier):
            needs.append(table.total_bytes(tier))
    return min(needs, default=None)


def _small(question: Question) -> Iterator[Plan]:
    """Plans that keep nothing that can be computed or fetched again."""
    asked = question.config.round_micro_batches
    for inputs, clip_mode in product(_inputs(question), _clip_modes(question)):
        least = question.num_micro_batches if clip_mode == "two-pass" else 1
        size = least if asked is None else min(asked, question.num_micro_batches)
        if size < least:
            continue
        streamed = _in_passes(_streamed(question, size, inputs), clip_mode)
        for num_residents in _resident_counts(question, clip_mode, least=1):
            resident = without_idle_slots(question, _with_residents(streamed, num_residents))
            yield from _with_disk(question, resident)
            yield from (resident, _all_on_disk(resident))  # with less to spare than it asks for


def _inputs(question: Question) -> list[Activations]:
    """What may happen to the input of every block: it stays in HBM, or waits in RAM; "keep" keeps all that is saved."""
    if question.config.activations == "keep":
        return ["keep"]
    return ["recompute"] if question.machine.device == "cpu" else ["recompute", "offload"]


def _clip_modes(question: Question) -> list[ClipMode]:
    """How the exact norm comes to be: gradients wait for it, or are computed twice, which takes the same bits twice."""
    asked = question.config.clip_mode
    if asked != "auto":
        return [asked]
    return ["deferred", "two-pass"] if question.config.deterministic else ["deferred"]


def _in_passes(plan: Plan, clip_mode: ClipMode) -> Plan:
    return replace(plan, clip_mode=clip_mode, grad_landing_slots=LANDING_SLOTS if clip_mode == "two-pass" else 0)


def _streamed(question: Question, round_micro_batches: int, activations: Activations) -> Plan:
    """Everything in RAM, blocks through shared slots."""
    segments = []
    for segment in question.shapes.spec.segments:
        trainable = any(tensor.trainable for tensor in segment.tensors)
        change = (("activations", activations),) if segment.kind == "block" else changes.OWN_WEIGHTS
        segments.append(changed(SegmentPlan(segment.name, segment.kind, trainable), change))
    return Plan(
        segments=tuple(segments),
        tied=question.shapes.spec.tied,
        weight_slots=question.config.weight_slots or 2,
        grad_slots=GRAD_SLOTS[0],
        round_micro_batches=round_micro_batches,
        act_slots=ACT_SLOTS if activations == "offload" else 0,
        embedding_trainable=embedding_of(question.shapes.spec).trainable,
    )


def placed(question: Question) -> Iterator[Plan]:
    """Every plan of the family that may fit, before what is left of HBM is used up."""
    heads = (True,) if question.shapes.spec.tied else (False, True)  # a tied HEAD weighs nothing
    finest = max(1, len(question.shapes.spec.segments) // FINEST)
    shares = dict.fromkeys([0.0, passing_share(question)])
    bases = product(_round_sizes(question), _inputs(question), _clip_modes(question), heads, GRAD_SLOTS, shares)
    for round_micro_batches, inputs, clip_mode, head_first, grad_slots, share in bases:
        if clip_mode == "two-pass" and (round_micro_batches < question.num_micro_batches or not head_first):
            continue  # between rounds a gradient needs its home
        more_slots = grad_slots != GRAD_SLOTS[0]
        if more_slots and (round_micro_batches > 1 or question.num_micro_batches == 1):
            continue  # sums come back seldom, or never
        if share and (more_slots or clip_mode == "two-pass"):
            continue  # one at a time; and in two passes no forward waits for updates
        streamed = _in_passes(_streamed(question, round_micro_batches, inputs), clip_mode)
        streamed = replace(streamed, grad_slots=grad_slots)
        counts = _resident_counts(question, clip_mode, finest)
        for num_residents in counts[::2] if share else counts:  # near the best of them it matters little
            start = _with_residents(streamed, num_residents, head_first)
            start = with_passing(question, start, share) if share else start
            resident = None if start is None else _aside(question, without_idle_slots(question, start))
            if resident is None:
                break  # more of them need more, and the host does less
            if not (more_slots or share):
                yield from _with_disk(question, resident)
            elif more_slots and resident.grad_slots < grad_slots:
                continue  # so few blocks share them
            elif memory_table(question, resident).verdict("ram") == "FITS":
                yield resident  # no disk counts for more


def _aside(question: Question, plan: Plan) -> Plan | None:
    """`plan`, with as few inputs of blocks waiting in RAM, from the front on, as let the device hold the rest; None if
    all of them are too few."""

    def room(changed: Plan) -> Room:
        return room_bytes(question, changed, (question.machine_tier,))

    lacks = room(plan)
    if min(lacks) >= 0:
        return plan
    if "offload" not in _inputs(question) or plan.offloaded:
        return None

    def aside(count: int) -> Plan:
        return replace(changed_at(plan, range(1, count + 1), changes.INPUT_ASIDE), act_slots=ACT_SLOTS)

    most, least = len(plan.blocks), ACT_SLOTS  # the slots of so few take what they give
    has = room(aside(most))
    if most <= least or min(has) < 0:
        return None
    return aside(border(lambda count: room(aside(count)), most, has, least, lacks))


def without_idle_slots(question: Question, plan: Plan) -> Plan:
    """`plan` without slots that nothing passes through: no more than blocks that share them, but for slots of weights
    that were asked for; none of inputs if none travels."""
    weights = sum(block.weights == "pool" for block in plan.blocks)
    grads = sum(block.grads == "pool" and block.trainable for block in plan.blocks)
    weight_slots = question.config.weight_slots or min(plan.weight_slots, max(1, weights))
    grad_slots = min(plan.grad_slots, max(1, grads))
    act_slots = plan.act_slots if plan.offloaded else 0
    if (weight_slots, grad_slots, act_slots) == (plan.weight_slots, plan.grad_slots, plan.act_slots):
        return plan
    return replace(plan, weight_slots=weight_slots, grad_slots=grad_slots, act_slots=act_slots)


def _with_residents(plan: Plan, count: int, head_first: bool = True) -> Plan:
    """`plan` with the state of `count` segments in HBM: from the front, as a forward pass waits for their updates
    first, HEAD behind EMBED, which is away only with slots as large as half of it, or last. In two passes the ends,
    whose gradients are largest, and blocks evenly spread: the others' updates then have time."""
    last = len(plan.segments) - 1
    ends, num_blocks = [0, last][:count], max(0, count - 2)
    if plan.clip_mode == "two-pass":
        return changed_at(plan, ends + spread(range(1, last), num_blocks), changes.RESIDENT_AT_ONCE)
    return changed_at(plan, [*ends, *range(1, num_blocks + 1)] if head_first else range(count), changes.RESIDENT)


def end_to_end(items: Sequence[int], count: int) -> list[int]:
    """`count` of `items` as far from each other as can be: the first, the last, and evenly between."""
    return [items[turn * (len(items) - 1) // max(1, count - 1)] for turn in range(count)]


def _with_disk(question: Question, plan: Plan) -> Iterator[Plan]:
    """`plan` with as little on disk as lets RAM hold the rest, with every number of landing slots; `plan` itself if
    that is nothing, or if not even everything would be enough."""
    if memory_table(question, plan).verdict("ram") == "FITS":
        yield plan
        return
    for slots in DISK_SLOTS:
        spilled = _spilled(question, plan, slots)
        yield spilled or plan
        if spilled is None:
            return  # more of them need more


def _all_on_disk(plan: Plan) -> Plan:
    """`plan` with all that is not in HBM on disk, through one landing slot."""
    away = [index for index, segment in enumerate(plan.segments) if segment.state != "hbm"]
    trained = [index for index in away if plan.segments[index].trainable]
    plan = changed_at(changed_at(plan, trained, changes.STATE_ON_DISK), away, changes.WEIGHTS_ON_DISK)
    return replace(plan, disk_slots=1 if away else 0)


def _spilled(question: Question, plan: Plan, disk_slots: int) -> Plan | None:
    """States go first, which a step reads and writes once, from the segment whose update may end last, or, in two
    passes, from the first update to the last, so that the disk has the whole second pass between them, and the first
    pass from the last to the first; then weights, which a step reads twice."""
    indices = [index for index in reversed(range(len(plan.segments))) if plan.segments[index].state != "hbm"]
    indices.sort(key=lambda index: plan.segments[index].kind != "block")
    order = [(index, changes.STATE_ON_DISK) for index in indices if plan.segments[index].trainable]
    order += [(index, changes.WEIGHTS_ON_DISK) for index in indices]
    blocks = [
        index for index, change in order if change is changes.STATE_ON_DISK and plan.segments[index].kind == "block"
    ]

    plan = replace(plan, disk_slots=disk_slots)
    in_order = steps_of(plan, order)

    def spilled(count: int) -> Plan:
        if plan.clip_mode == "two-pass" and count < len(blocks):
            return changed_at(plan, end_to_end(blocks, count), changes.STATE_ON_DISK)
        return in_order(count)

    def room(count: int) -> Room:
        return room_bytes(question, spilled(count), ("ram",))

    num_states = sum(change is changes.STATE_ON_DISK for _, change in order)
    lacks = room(0)
    for fails, fits in pairwise((0, len(blocks), num_states, len(order))):  # between them all take about as much
        if fits > fails:
            has = room(fits)
            if min(has) >= 0:
                return spilled(border(room, fits, has, fails, lacks))
            lacks = has
    return None


def _round_sizes(question: Question) -> list[int]:
    """Sizes of a round worth trying: as few rounds as possible, then twice as many, …"""
    asked, total = question.config.round_micro_batches, question.num_micro_batches
    if asked is not None:
        return [min(asked, total)]
    return list(dict.fromkeys(-(-total // num_rounds) for num_rounds in _steps(total, 2.0)))


def _resident_counts(question: Question, clip_mode: ClipMode, least: int) -> list[int]:
    """None, one, and `least` more at a time at least; in two passes not many more, as what of HBM holds no state may
    put one more on the disk."""
    if question.machine.device == "cpu":
        return [0]
    most = len(question.shapes.spec.segments)
    return [0, *_steps(most, STEP if clip_mode == "deferred" else SMALL_STEP, least)]


def _steps(most: int, factor: float, least: int = 1) -> list[int]:
    """1 … most, each about `factor` times the one before, and `least` more at least."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + least, int(found[-1] * factor))))
    return found


def fillings(question: Question) -> tuple[Filling, Filling]:
    """(Attention to keep where that saves more time for its bytes than to keep all, what saves most first; all
    activations to keep, from the last block on.) Both empty if the user says what is kept."""
    spec, names = question.shapes.spec, [segment.name for segment in question.shapes.spec.segments]
    if question.config.activations != "auto" or not trains(spec):
        return [], []
    lowest = next(i for i, segment in enumerate(spec.segments) if any(t.trainable for t in segment.tensors))
    blocks = range(len(names) - 2, max(lowest, 1) - 1, -1)
    shapes, saved_s = question.shapes, partial(_saved_s, question)
    rates = {
        index: saved_s(names[index], "attn") / shapes.attended_bytes[names[index]]
        for index in blocks
        if names[index] in shapes.attended_bytes
    }
    worth = [i for i in rates if rates[i] > saved_s(names[i], "kept") / shapes.saved_bytes[names[i]]]
    worth.sort(key=lambda index: -rates[index])
    return [(index, changes.ATTENTION_KEPT) for index in worth], [(index, changes.KEPT) for index in blocks]


def _saved_s(question: Question, block: str, pool: str) -> float:
    """What one micro-batch's visits of a block get shorter by if it keeps a place of `pool`."""
    kept, costs = (Place(pool, 0, 0),), question.work.costs
    forward, backward = (partial(Op, kind, block, 0, Lane.COMPUTE) for kind in (Kind.FORWARD, Kind.BACKWARD))
    without_s = costs.seconds(forward((), ())) + costs.seconds(backward((), ()))
    return without_s - costs.seconds(forward((), kept)) - costs.seconds(backward(kept, ()))


def filled(question: Question, plan: Plan, attention: Filling, everything: Filling) -> Iterator[Plan]:
    """`plan` with what is left of HBM used up, in every way of the family; nothing if it does not fit itself."""
    has = room_bytes(question, plan, TIERS)
    if min(has) < 0:
        return
    streaming = [index for index in range(len(plan.segments) - 2, 0, -1) if plan.segments[index].weights == "pool"]
    stays = changes.OWN_WEIGHTS if plan.clip_mode == "deferred" else changes.OWN_WEIGHTS_AT_ONCE
    own = [(index, stays) for index in streaming] if question.machine.device == "cuda" else []
    attending, left = _most(question, plan, has, attention)
    if left is None:
        yield attending
    else:  # there may be room for more
        yield _most(question, attending, left, everything)[0]
        yield _most(question, attending, left, own)[0]
    if attending is not plan or left is None:
        yield _most(question, plan, has, own)[0]


def _most(question: Question, plan: Plan, has: Room, filling: Filling) -> tuple[Plan, Room | None]:
    """`plan`, which fits and then `has` so much room, with as many of the changes as fit, and what is left behind all
    of them; None: not all fit."""
    if not filling:
        return plan, has
    filled = steps_of(plan, filling)

    def room(count: int) -> Room:
        return room_bytes(question, filled(count), TIERS)

    lacks = room(len(filling))
    if min(lacks) >= 0:
        return filled(len(filling)), lacks
    return filled(border(room, 0, has, len(filling), lacks)), None

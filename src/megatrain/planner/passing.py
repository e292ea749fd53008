"""Passing: which updates of what lives in RAM the device does, its state on the way through. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatrain.planner import changes
from megatrain.planner.account import Question
from megatrain.planner.changes import changed_at
from megatrain.planner.costs import UPDATE_SHARE
from megatrain.schedule.build import rounds
from megatrain.schedule.ops import Kind, Lane, Op
from megatrain.schedule.plan import Plan

STATE_SLOTS = 2  # one is updated and stored, one is fetched
# Of the host's updates over the forward pass of a round, which hides them. Of 20 searches (simulated) those with 1.6
# and more gave faster plans, those with 1.1 and less none.
LEAST_WAIT = 1.5
# Fitted to 48 blocks on 13 machines, two steps each (simulated): no share of a row is more than 8 % faster; without it
# some are 13 %.
WAITS = 0.35


def passing_share(question: Question) -> float:
    """The share of the host's updates worth doing on the device: with it CPU, host memory and link end together.

    Of each parameter the host moves 28 bytes through its memory; an update on the device moves 14 there and 12 back,
    and the weights' 2 go there anyway. A link that now and then waits for the host gets less, the more it waits.
    """
    if question.machine.device == "cpu":
        return 0.0
    rates = question.work.rates
    host_per_s = UPDATE_SHARE * rates.update_params_per_s
    memory_s = 30 / rates.dram_Bps
    link_s = max(28 / (rates.link_both_Bps + 26 * host_per_s), 16 / (rates.h2d_Bps + 14 * host_per_s))
    share = 1 - host_per_s * max(memory_s, link_s)
    return max(0.0, share if memory_s > link_s else share * (1 - WAITS * (1 - share) ** 2))


def with_passing(question: Question, plan: Plan, share: float) -> Plan | None:
    """`plan` with so much of its blocks' updates on the host done on the device instead, evenly spread; None where the
    step would not wait for the host."""
    on_host = [i for i, s in enumerate(plan.segments) if s.kind == "block" and s.trainable and s.state == "ram"]
    num_rounds = len(rounds(question.num_micro_batches, plan.round_micro_batches))
    hidden_s = _seconds(question, plan, range(1, len(plan.segments) - 1), Kind.FORWARD, Lane.COMPUTE)
    hidden_s *= question.num_micro_batches / num_rounds
    if not on_host or _seconds(question, plan, on_host, Kind.UPDATE, Lane.HOST) < LEAST_WAIT * hidden_s:
        return None
    chosen = spread(on_host, round(share * len(on_host)))
    return replace(changed_at(plan, chosen, changes.PASSING), state_slots=min(STATE_SLOTS, len(chosen)))


def _seconds(question: Question, plan: Plan, indices: Sequence[int], kind: Kind, lane: Lane) -> float:
    micro_batch = 0 if kind is Kind.FORWARD else None
    ops = (Op(kind, plan.segments[index].name, micro_batch, lane, (), ()) for index in indices)
    return sum(map(question.work.costs.seconds, ops))


def spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of `items`, as evenly as can be."""
    return [items[(2 * turn + 1) * len(items) // (2 * count)] for turn in range(count)]

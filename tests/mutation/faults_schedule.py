"""Faults in the schedule."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

SCHEDULE = "tests/schedule/test_build.py tests/schedule/test_check.py"
NORM = "tests/optim/test_norm.py"
CHECKER = (
    "tests/schedule/test_check.py tests/schedule/test_mutants.py "
    "-k (test_check)or(exchanges_that)or((every_fault)and(tied)and(flush))"
)

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "schedule/waits.py",
        SCHEDULE,
        (
            "no wait for the writer of what is read",
            "for place in (*op.reads, *op.writes) if",
            "for place in op.writes if",
        ),
        ("no wait for earlier readers", "before.update(self._reads[place].values())", "pass"),
        ("implied waits are kept", "if lane == own or clock[lane] >= position[before]:", "if lane == own:"),
        (
            "the last needed wait is dropped",
            "waits.append(tuple(reversed(chosen)))",
            "waits.append(tuple(reversed(chosen[1:])))",
        ),
    ),
    *of(
        "schedule/slots.py",
        SCHEDULE,
        ("the slot that is needed soonest is given away", "farthest = max(next_uses)", "farthest = min(next_uses)"),
        ("a slot in use may be given away", "if farthest <= self._ahead:", "if farthest < 0:"),
        ("gradient slots always the first", 'slot = Place("g", len(users) % num_slots)', 'slot = Place("g", 0)'),
        ("an incomplete sum is not sent home", 'return segment.grads == "pool" and self._rotates', "return False"),
        ("states that pass all take one slot", 'Place("s", len(users) % plan.state_slots)', 'Place("s", 0)'),
        ("a state may come behind its update", "min(users[-slots] + 1, visit.number - 1)", "users[-slots] + 1"),
    ),
    *of(
        "schedule/build.py",
        SCHEDULE,
        ("the tied sums are not merged", "if visit.last_round and self.tied_grad:", "if False:"),
        (
            "norm in every round",
            "            if visit.last_round and not visit.again:\n                yield Op(Kind.NORM",
            "            if not visit.again:\n                yield Op(Kind.NORM",
        ),
        (
            "norm in the first round only",
            "if visit.last_round and not visit.again:",
            "if visit.first_round and not visit.again:",
        ),
        (
            "block gradients zeroed in every round",
            "        block, grad = visit.index - 1, self.grads[visit]\n        if visit.first_round:",
            "        block, grad = visit.index - 1, self.grads[visit]\n        if True:",
        ),
        (
            "the last micro-batch of a round is left out",
            "range(start, stop) for start, stop in pairwise(edges)",
            "range(start, max(start + 1, stop - 1)) for start, stop in pairwise(edges)",
        ),
        ("the embedding gets no backward", "if self.lowest == 0:", "if False:"),
    ),
    *of(
        "schedule/check.py",
        CHECKER,
        (
            "the checker trusts what is read",
            '        if held.get(place) != content:\n            raise Fault(f"reads',
            '        if False:\n            raise Fault(f"reads',
        ),
        ("the checker forgets earlier readers", "earlier += self._readers.get(place, {}).values()", "earlier += []"),
        ("the checker lets races pass", "if clock.get(lane, 0) <= turn:", "if clock.get(lane, 0) < turn:"),
        ("the checker allows any slot", "if place not in allowed:", "if place not in allowed and not allowed:"),
    ),
    *of(
        "schedule/liveness.py",
        "tests/schedule tests/engine/test_identity.py -k (dead)or(peak)or(layer_calls)",
        (
            "dead at the first use",
            "                last[place] = id(op)",
            "                last.setdefault(place, id(op))",
        ),
    ),
    *of(
        "schedule/build.py",
        SCHEDULE,
        ("the second pass measures again", "if visit.last_round and not visit.again:", "if visit.last_round:"),
        ("the second pass updates nothing", "            if visit.again:\n", "            if False:\n"),
        ("the second pass gives the loss again", "*(() if visit.again else (loss,)), *sums)", "loss, *sums)"),
        (
            "what the step before left is not written",
            "        if self.pending_spills:\n            yield from self.landing.late_spills()\n",
            "",
        ),
    ),
    *of(
        "schedule/slots.py",
        SCHEDULE,
        (
            "the first pass sends gradients home",
            'if self._plan.clip_mode == "two-pass" and not visit.again:',
            "if False:",
        ),
        ("no input comes back for the second pass", "if below is not None or last_pass else", "if True else"),
    ),
    *of(
        "schedule/landing.py",
        SCHEDULE,
        ("states are written behind the last updates too", "if segment.name in self._late:", "if False:"),
    ),
    *of(
        "schedule/plan.py",
        SCHEDULE,
        (
            "states that stay where they are are written late",
            "turns = range(max(len(updated) - self.disk_slots, self.disk_slots), len(updated))",
            "turns = range(max(len(updated) - self.disk_slots, 0), len(updated))",
        ),
    ),
)

"""Symbols: what a schedule computes, as terms, and what it should compute, from plain loops. Owes nothing to check.py.

A value is a nested tuple (interned to a number): an op's result is named after the op and its operands, copies are what
they copy. Two schedules that yield equal terms yield equal bits, whatever the ops really do. `explore` runs a schedule
in every order that lanes and waits permit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatrain.schedule import CELL, TIED_GRAD, Kind, Lane, Op, Place, Plan, Program, Run, Schedule, SegmentPlan

Memory = dict[Place, int]
Results = dict[tuple[str, str | int], int]  # (what, of) -> term


class Terms:
    """Numbers for terms: equal numbers, equal terms."""

    def __init__(self) -> None:
        self._numbers: dict[tuple, int] = {}

    def __call__(self, *term: str | int | None) -> int:
        return self._numbers.setdefault(term, len(self._numbers))


def reference(plan: Plan, runs: Sequence[Run], terms: Terms) -> list[Results]:
    """The results of each program, from loops over segments and micro-batches: no slot, lane or round in sight."""
    weights = {s.name: terms("weights", s.name) for s in plan.segments}
    state = {s.name: terms("state", s.name) for s in plan.segments}
    pending: tuple[dict[str, int], int] | None = None
    results: list[Results] = []
    for run in runs:
        if pending is not None:
            for name, grad in pending[0].items():
                operands = (name, grad, pending[1], state[name], weights[name])
                state[name], weights[name] = terms("state'", *operands), terms("weights'", *operands)
            pending = None
        result: Results = {("weights", name): term for name, term in weights.items()}
        result |= {("state", s.name): state[s.name] for s in plan.segments if s.trainable}
        if run.program in ("train", "eval"):
            losses, grads = _step(plan, run.num_micro_batches, weights, terms)
            result |= {("loss", m): term for m, term in enumerate(losses)}
        if run.program == "train":
            norms = [terms("norm", name, grad) for name, grad in grads.items()]
            cell = terms("cell", *norms, *losses)
            result["cell", ""] = cell
            pending = (grads, cell)
        if run.program == "train" and plan.clip_mode == "two-pass":
            pending = None
            for name, grad in grads.items():
                operands = (name, grad, cell, state[name], weights[name])
                state[name], weights[name] = terms("state'", *operands), terms("weights'", *operands)
            result |= {("weights", name): term for name, term in weights.items()}
            result |= {("state", s.name): state[s.name] for s in plan.segments if s.trainable}
        if run.program == "save":
            for s in plan.segments:
                kept = (weights[s.name], state[s.name]) if s.trainable else (weights[s.name],)
                result["file", s.name] = terms("file", s.name, *kept)
        results.append(result)
    return results


def _step(plan: Plan, num: int, weights: dict[str, int], terms: Terms) -> tuple[list[int], dict[str, int]]:
    blocks = [s.name for s in plan.blocks]
    sums = {s.name: terms("zero") for s in plan.segments if s.trainable}
    head_sum = terms("zero")
    losses = []
    for m in range(num):
        call = terms("call", weights["EMBED"], m)
        acts = [terms("act0", weights["EMBED"], m)]
        for name in blocks:
            acts.append(terms("forward", name, weights[name], acts[-1], call))
        tied = (weights["EMBED"],) if plan.tied else ()
        inputs = (weights["HEAD"], *tied, acts[-1], m)
        losses.append(terms("loss", *inputs))
        dact = terms("dhead", *inputs)
        head_sum = terms("add", head_sum, terms("dtied", *inputs))
        if "HEAD" in sums:
            sums["HEAD"] = terms("add", sums["HEAD"], terms("dweights", "HEAD", *inputs))
        for index in reversed(range(len(blocks))):
            name = blocks[index]
            inputs = (weights[name], acts[index], call, dact)
            if name in sums:
                sums[name] = terms("add", sums[name], terms("dweights", name, *inputs))
            dact = terms("dact", name, *inputs)
        if "EMBED" in sums:
            sums["EMBED"] = terms("add", sums["EMBED"], terms("dweights", "EMBED", weights["EMBED"], dact, m))
    if plan.tied and "EMBED" in sums:
        sums["EMBED"] = terms("merge", head_sum, sums["EMBED"])
    return losses, sums


def weights_home(s: SegmentPlan) -> Place:
    return Place("w" if s.state == "hbm" else f"{s.weights_home}.w", s.name)


def state_home(s: SegmentPlan) -> Place:
    return Place(f"{s.state}.state", s.name)


def start(plan: Plan, terms: Terms) -> Memory:
    memory: Memory = {}
    for s in plan.segments:
        memory[weights_home(s)] = terms("weights", s.name)
        memory[state_home(s)] = terms("state", s.name)
    return memory


def homes_only(plan: Plan, memory: Memory, program: Program) -> Memory:
    """What is left of memory when `program` is over."""
    in_hbm = {s.name for s in plan.segments if s.state == "hbm"}
    landed = set()
    if program == "train":  # what is not on disk yet
        landed = {Place("land.state", slot) for _, slot in plan.spilled_late}
    return {
        place: term
        for place, term in memory.items()
        if place == CELL
        or place in landed
        or place.pool in ("ram.w", "ram.state", "ram.grad", "hbm.state", "disk.w", "disk.state")
        or (place.pool in ("w", "g") and place.key in in_hbm)
    }


def results_of(plan: Plan, run: Run, memory: Memory) -> Results:
    results: Results = {}
    late = {name: Place("land.state", slot) for name, slot in plan.spilled_late if run.program == "train"}
    for s in plan.segments:
        results["weights", s.name] = memory.get(weights_home(s), -1)
        if s.trainable:
            results["state", s.name] = memory.get(late.get(s.name, state_home(s)), -1)
        if run.program == "save":
            results["file", s.name] = memory.get(Place("file", s.name), -1)
    if run.program in ("train", "eval"):
        for m in range(run.num_micro_batches):
            results["loss", m] = memory.get(Place("loss", "", m), -1)
    if run.program == "train":
        results["cell", ""] = memory.get(CELL, -1)
    return results


def execute(op: Op, memory: Memory, terms: Terms) -> list[int]:
    """The terms that `op` writes, in the order of its places. An unwritten place reads as garbage of its own name."""
    read = [memory[p] if p in memory else terms("garbage", str(p)) for p in op.reads]
    m = op.micro_batch
    match op.kind:
        case (
            Kind.FETCH
            | Kind.FETCH_STATE
            | Kind.FETCH_GRAD
            | Kind.DRAIN
            | Kind.LOAD
            | Kind.LOAD_STATE
            | Kind.OFFLOAD
            | Kind.RELOAD
            | Kind.STORE
            | Kind.STORE_STATE
        ):
            return read[:1]
        case Kind.SPILL:
            return read[:2]
        case Kind.ZERO:
            return [terms("zero")]
        case Kind.EMBED:
            return [terms("act0", *read, m), terms("call", *read, m)]
        case Kind.FORWARD:
            return [terms("forward", op.segment, *read), *(terms(p.pool, op.segment, *read) for p in op.writes[1:])]
        case Kind.HEAD | Kind.LOSS:
            sums = [p for p in op.reads if p.pool in ("g", "tied.grad")]
            inputs = (*read[: len(read) - len(sums)], m)
            if op.kind is Kind.LOSS:
                return [terms("loss", *inputs)]
            parts = {p: ("dtied",) if p == TIED_GRAD else ("dweights", op.segment) for p in sums}
            added = [terms("add", read[op.reads.index(p)], terms(*parts[p], *inputs)) for p in sums]
            losses = [terms("loss", *inputs) for p in op.writes if p.pool == "loss"]
            return [terms("dhead", *inputs), *losses, *added]
        case Kind.BACKWARD:
            return _backward(op, read, terms)
        case Kind.EMBED_BACKWARD:
            return [terms("add", read[2], terms("dweights", op.segment, *read[:2], m))]
        case Kind.MERGE:
            return [terms("merge", *read)]
        case Kind.NORM:
            return [terms("norm", op.segment, *read)]
        case Kind.CLIP:
            return [terms("cell", *read)]
        case Kind.UPDATE:
            return [terms("state'", op.segment, *read), terms("weights'", op.segment, *read)]
        case Kind.SAVE:
            return [terms("file", op.segment, *read)]
    raise AssertionError(op.kind)


def _backward(op: Op, read: list[int], terms: Terms) -> list[int]:
    inputs = tuple(read[:4])
    for place, term in zip(op.reads, read, strict=True):
        if place.pool in ("kept", "attn") and term != terms(place.pool, op.segment, *read[:3]):
            inputs = (*inputs, term)  # not of this layer, these weights and this input: another result
    grad = [term for place, term in zip(op.reads, read, strict=True) if place.pool == "g"]
    return [
        terms("dact", op.segment, *inputs),
        *(terms("add", g, terms("dweights", op.segment, *inputs)) for g in grad),
    ]


def in_order(plan: Plan, runs: Sequence[Run], terms: Terms) -> list[Results]:
    """The results of each program when every op runs in the order of the list."""
    memory = start(plan, terms)
    results = []
    for run in runs:
        for op in run.schedule:
            memory.update(zip(op.writes, execute(op, memory, terms), strict=False))
        results.append(results_of(plan, run, memory))
        memory = homes_only(plan, memory, run.program)
    return results


def explore(schedule: Schedule, memory: Memory, terms: Terms) -> Iterator[Memory]:
    """Every different final memory over all orders that lanes and waits permit; a deadlock yields an empty one."""
    lanes = [[op for op in schedule if op.lane is lane] for lane in Lane]
    recorder = {op.records: (n, i) for n, ops in enumerate(lanes) for i, op in enumerate(ops) if op.records}
    todo = [((0,) * len(lanes), memory)]
    seen: set[tuple] = set()
    while todo:
        done, memory = todo.pop()
        if all(d == len(ops) for d, ops in zip(done, lanes, strict=True)):
            yield memory
            continue
        stuck = True
        for n, ops in enumerate(lanes):
            if done[n] == len(ops) or any(done[recorder[t][0]] <= recorder[t][1] for t in ops[done[n]].waits):
                continue
            stuck = False
            op = ops[done[n]]
            after = (*done[:n], done[n] + 1, *done[n + 1 :])
            changed = memory | dict(zip(op.writes, execute(op, memory, terms), strict=False))
            key = (after, frozenset(changed.items()))
            if key not in seen:
                seen.add(key)
                todo.append((after, changed))
        if stuck:
            yield {}

"""A step in simulated time, by other means than the planner's: what `plan` prints of seconds is held against it.

The order of the ops and what each waits for are the schedule's, of all rounds (tests/schedule holds it). What an op
takes alone, what it shares and how time passes is worked out here, from shapes, the machine's rates and
docs/planning.md; nothing of the planner or of the schedule's own simulation is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatrain.schedule.ops import Kind, Lane, Op
from tests.planner.large_models import CHUNK, Model, T

UPDATE_BYTES = 28  # of host memory that an update moves for a parameter
DISK = (Lane.DISK, Lane.DISK_READ)


@dataclass(frozen=True)
class Hand:
    """Seconds of every op alone, and what it takes of what is shared. `rates`: those of a machine's file. `at_once`:
    the micro-batches that an op stands for, if it is of one."""

    model: Model
    rates: Mapping[str, Any]
    at_once: int

    def parameters(self, segment: str) -> int:
        return {"EMBED": self.model.embed, "HEAD": self.model.head}.get(segment, self.model.block)

    def alone_s(self, op: Op) -> float:
        return self._once_s(op) * (1 if op.micro_batch is None else self.at_once)

    def _once_s(self, op: Op) -> float:
        if op.kind is Kind.CLIP:
            return self.rates["op_s"] + 2e-3
        moved_bytes = self.moved_bytes(op)
        return self.rates["op_s"] + (moved_bytes / self._speed_Bps(op) if moved_bytes else self._computed_s(op))

    def moved_bytes(self, op: Op) -> int:
        """Of an op that travels; 0: it computes."""
        parameters = self.parameters(op.segment)
        return {
            Kind.FETCH: 2 * parameters,
            Kind.FETCH_GRAD: 4 * parameters,
            Kind.DRAIN: 4 * parameters,
            Kind.OFFLOAD: 2 * T * self.model.hidden,
            Kind.RELOAD: 2 * T * self.model.hidden,
            Kind.LOAD_STATE: 10 * parameters,
            Kind.SPILL: 10 * parameters,
        }.get(op.kind, 0)

    def _speed_Bps(self, op: Op) -> float:
        names = {Lane.H2D: "h2d_Bps", Lane.D2H: "d2h_Bps", Lane.DISK: "disk_write_Bps", Lane.DISK_READ: "disk_read_Bps"}
        return self.rates[names[op.lane]]

    def _computed_s(self, op: Op) -> float:
        model, parameters = self.model, self.parameters(op.segment)
        matmul, hbm = self.rates["matmul_flops_per_s"], self.rates["hbm_Bps"]
        if op.kind is Kind.UPDATE and op.lane is Lane.HOST:
            return parameters / (1.1 * self.rates["update_params_per_s"])
        if op.kind in (Kind.FORWARD, Kind.BACKWARD):
            return self._block_s(op)
        table = model.vocab * model.hidden
        return {
            Kind.EMBED: 12 * T * model.hidden / hbm,
            Kind.EMBED_BACKWARD: 130 * T * model.hidden / hbm,
            Kind.HEAD: 6 * T * table / (0.85 * matmul) + (12 * T * model.vocab + T // CHUNK * 12 * table) / hbm,
            Kind.ZERO: 4 * parameters / hbm,
            Kind.NORM: 4 * parameters / hbm,
            Kind.MERGE: 3 * 4 * parameters / hbm,
            Kind.UPDATE: UPDATE_BYTES * parameters / hbm,
        }[op.kind]

    def _block_s(self, op: Op) -> float:
        """Forward of a block: products, attention, elementwise work; backward: twice, 2.5 ÷ 0.8 times, twice that, and
        all of it once more, but for attention that was kept, which is copied in and out."""
        model, hbm = self.model, self.rates["hbm_Bps"]
        products = 2 * T * ((model.active - model.experts) / 0.88 + model.experts / 0.40)
        products /= self.rates["matmul_flops_per_s"]
        attention = model.attention[int(op.segment[1:])] / self.rates["attention_flops_per_s"]
        elementwise = (2 * T * model.widths + 2 * model.block) / hbm
        kept = any(place.pool == "attn" for place in (*op.reads, *op.writes))
        copied = 2 * T * model.attended / hbm if kept else 0.0
        if op.kind is Kind.FORWARD:
            return products + attention + elementwise + copied
        again = products + elementwise + (0.0 if kept else attention)
        added = 12 * model.block / hbm
        return 2 * products + 2.5 / 0.8 * attention + 2 * elementwise + again + added + copied

    def takes(self, op: Op) -> dict[str, float]:
        """What an op takes of link, host memory and disk, in units a second, while nothing slows it."""
        if op.kind is Kind.UPDATE and op.lane is Lane.HOST:
            return {"host memory, last": UPDATE_BYTES * self.parameters(op.segment) / self._once_s(op)}
        moved_bytes = self.moved_bytes(op)
        if not moved_bytes:
            return {}
        speed_Bps = moved_bytes / self._once_s(op)
        return {"host memory": speed_Bps} | ({"disk": 1.0} if op.lane in DISK else {"link": speed_Bps})


@dataclass(frozen=True)
class Played:
    """When each op ran; `chain`: of the ops that ran back to back and end with the step, the first one last."""

    ops: Sequence[Op]
    start_s: Sequence[float]
    end_s: Sequence[float]
    chain: Sequence[int]

    @property
    def step_s(self) -> float:
        return max(self.end_s)

    def busy_s(self) -> dict[str, float]:
        """By lane."""
        found = Counter[str]()
        for op, start_s, end_s in zip(self.ops, self.start_s, self.end_s, strict=True):
            found[str(op.lane)] += end_s - start_s
        return dict(found)

    def chain_s(self) -> dict[str, float]:
        """By lane and kind."""
        found = Counter[str]()
        for index in self.chain:
            op = self.ops[index]
            found[f"{op.lane} {op.kind}"] += self.end_s[index] - self.start_s[index]
        return dict(found)


def speeds(takes: Sequence[Mapping[str, float]], rates: Mapping[str, Any]) -> list[float]:
    """Of ops that run at one time. The disk does one thing at a time, and an update gets what host memory has left."""
    asked = Counter[str]()
    for one in takes:
        asked.update(one)
    has = {"link": rates["link_both_Bps"], "disk": 1.0, "host memory": rates["dram_Bps"]}
    has["host memory, last"] = has["host memory"] - asked["host memory"]
    return [min([1.0, *(has[name] / asked[name] for name in one)]) for one in takes]


def play(ops: Sequence[Op], hand: Hand) -> Played:
    """Every lane in order, every op when what it waits for is done."""
    told_by = {op.records: index for index, op in enumerate(ops) if op.records}
    awaited = [[told_by[token] for token in op.waits] for op in ops]
    queues: dict[Lane, list[int]] = {lane: [] for lane in Lane}
    for index, op in enumerate(ops):
        if queues[op.lane]:
            awaited[index].append(queues[op.lane][-1])
        queues[op.lane].append(index)
    left_s = [hand.alone_s(op) for op in ops]
    start_s, end_s = [0.0] * len(ops), [float("inf")] * len(ops)
    now_s, heads = 0.0, dict.fromkeys(Lane, 0)
    running: list[int] = []
    while True:
        for lane, queue in queues.items():
            head = heads[lane]
            if head < len(queue) and all(end_s[cause] <= now_s for cause in awaited[queue[head]]):
                heads[lane] += 1
                start_s[queue[head]] = now_s
                running.append(queue[head])
        if not running:
            break
        pace = speeds([hand.takes(ops[index]) for index in running], hand.rates)
        pass_s = min(left_s[index] / speed for index, speed in zip(running, pace, strict=True))
        now_s += pass_s
        for index, speed in zip(running, pace, strict=True):
            left_s[index] -= pass_s * speed
            if left_s[index] <= 1e-9:
                end_s[index] = now_s
        running = [index for index in running if end_s[index] > now_s]
    chain, link = [], max(range(len(ops)), key=end_s.__getitem__)
    while True:
        chain.append(link)
        if not awaited[link]:
            return Played(ops, start_s, end_s, chain)
        link = max(awaited[link], key=end_s.__getitem__)

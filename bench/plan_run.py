"""One planned setting, run: what it takes in seconds and bytes, and what the bytes are made of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.step import HYPER, random_batches, randomise, supervised_of, used_hbm_bytes
from bench.timing import Pace, empty_cache, timed
from megatrain.cli.assemble import Planned, engine_of, store_of
from megatrain.engine import Engine
from megatrain.engine.trace import Trace
from megatrain.memory import cap_device_memory, peak_rss_bytes
from megatrain.models.batch import TokenBatch
from megatrain.schedule.ops import Kind, Op


@dataclass(frozen=True)
class Mark:
    """Bytes at one moment. `driver`: used on the GPU by all, `reserved`: by torch's pool, `allocated`: in use of it.

    `device_allocations`: how often the pool asked the device for memory until then; `retries`: how often it had to give
    unused pieces back before, which stops the GPU.
    """

    rss: int
    driver: int
    reserved: int
    allocated: int
    device_allocations: int
    retries: int

    @property
    def outside(self) -> int:
        """CUDA's context, loaded kernels, other programs."""
        return self.driver - self.reserved


def mark() -> Mark:
    """This moment."""
    if not torch.cuda.is_available():
        return Mark(_rss_bytes(), 0, 0, 0, 0, 0)
    stats = torch.cuda.memory_stats()
    return Mark(
        _rss_bytes(), used_hbm_bytes() or 0, torch.cuda.memory_reserved(), torch.cuda.memory_allocated(),
        stats.get("num_device_alloc", 0), stats.get("num_alloc_retries", 0),
    )  # fmt: skip


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Run:
    """What was seen of a setting."""

    steps_s: tuple[float, ...]
    start_s: float  # from nothing to the end of the first step
    lanes_s: dict[str, float]
    kinds_s: dict[str, float]  # "lane KIND" -> seconds of the ops of one step
    marks: dict[str, Mark]  # begun, capped, stored, first step, end
    peak_ram_bytes: int
    peak_hbm_bytes: int  # as the driver counts
    peak_allocated_bytes: int  # of torch's pool
    working_bytes: dict[str, tuple[int, int]]  # kind of op -> at its peak, and at its end, beyond what was there before


@contextmanager
def set_up(run: Planned, marks: dict[str, Mark]) -> Iterator[Engine]:
    """The engine as `megatrain train` makes them, with random weights."""
    if run.config.memory.hbm is not None and run.device.type == "cuda":
        cap_device_memory(run.config.memory.hbm)
    marks["capped"] = mark()
    Path(run.config.output_dir).mkdir(parents=True, exist_ok=True)
    store = store_of(run)
    try:
        randomise(store, run.device)
        empty_cache()  # drawing the weights is no part of a run
        marks["stored"] = mark()
        engine = engine_of(run, store)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        store.close()


def play(run: Planned, pace: Pace) -> Run:
    """Run a planned setting."""
    started = time.perf_counter()
    marks = {"begun": mark()}
    batches = batches_of(run)
    supervised = supervised_of(batches)
    start_s, lanes_s = 0.0, dict[str, float]()
    with set_up(run, marks) as engine:

        def step() -> None:
            nonlocal lanes_s
            lanes_s = engine.train_step(batches, supervised, HYPER).lanes_s

        def first() -> None:
            nonlocal start_s
            start_s = time.perf_counter() - started
            marks["first step"] = mark()

        steps_s = timed(step, pace, first)
        marks["end"] = mark()
        peaks = peak_rss_bytes(), max(m.driver for m in marks.values()), peak_allocated_bytes()
        seen = lanes_s, kinds_s(engine.trace)
        working = working_bytes(engine, step)
    return Run(steps_s, start_s, *seen, marks, *peaks, working)


def kinds_s(trace: Trace) -> dict[str, float]:
    """ "lane KIND" -> seconds of all such ops."""
    total: dict[str, float] = {}
    for op, start_s, end_s in trace.timed():
        key = f"{op.lane} {op.kind}"
        total[key] = total.get(key, 0.0) + end_s - start_s
    return total


def peak_allocated_bytes() -> int:
    """The most that was in use of torch's pool of this process."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def working_bytes(engine: Engine, step: Callable[[], None]) -> dict[str, tuple[int, int]]:
    """Kind of op -> the most that an op of it had allocated beyond what was there before it, at its peak and at its end
    (a FORWARD that keeps: what it keeps); of one more step."""
    if not torch.cuda.is_available():
        return {}
    table = engine._handlers.table  # the pool counts when an op is issued: no wait is needed
    most: dict[str, tuple[int, int]] = {}

    def watched(kind: Kind, handler: Callable[[Op], object]) -> Callable[[Op], object]:
        def handle(op: Op) -> object:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = handler(op)
            seen = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
            peak, left = most.get(str(kind), (0, 0))
            most[str(kind)] = max(peak, seen[0]), max(left, seen[1])
            return result

        return handle

    plain = dict(table)
    for kind in (Kind.EMBED, Kind.FORWARD, Kind.HEAD, Kind.BACKWARD, Kind.EMBED_BACKWARD):
        table[kind] = watched(kind, plain[kind])  # type: ignore[assignment]
    try:
        step()
    finally:
        table.update(plain)
    return most


def batches_of(run: Planned) -> list[TokenBatch]:
    """The micro-batches of one step."""
    tokens = run.config.micro_batch_tokens
    assert tokens is not None, "planned resolves the config"
    count = run.question.num_micro_batches
    return random_batches(run.spec.vocab_size, tokens, run.config.max_length, count, run.device)

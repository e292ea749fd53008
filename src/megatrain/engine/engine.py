"""Engine: the programs of a run. Builds each schedule once, gives it its data, and hands it to the executor."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatrain import optim
from megatrain.engine.chaos import Chaos
from megatrain.engine.executor import Executor
from megatrain.engine.handlers import Disturb, Handlers, Step, undisturbed
from megatrain.engine.lanes import drained_lanes, lane_devices, take_workspaces
from megatrain.engine.places import Places
from megatrain.engine.rules import HostRule, device_rule, with_average
from megatrain.engine.trace import Trace
from megatrain.models.batch import TokenBatch
from megatrain.models.dice import key_of
from megatrain.models.neftune import with_noise
from megatrain.models.template import ModelTemplate
from megatrain.schedule.build import Program, build
from megatrain.schedule.liveness import last_calls
from megatrain.schedule.ops import Lane, Place, Schedule
from megatrain.schedule.plan import Plan
from megatrain.schedule.waits import one_by_one
from megatrain.store.store import SegmentStore
from megatrain.store.waiting import WaitingInputs

SYNC = "MEGATRAIN_SYNC"  # in the environment, not empty: one op at a time, to find the op at which a run crashes

log = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Numerics:
    """Settings that change bits, as the engine needs them (all micro-batches have `micro_batch_tokens`)."""

    micro_batch_tokens: int
    loss_chunk_tokens: int
    max_grad_norm: float | None
    label_smoothing: float = 0.0
    neftune_alpha: float | None = None
    seed: int = 0  # of noise and dropout
    ema_decay: float | None = None  # of the average of the masters; None: none is kept


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave. `loss` is the mean over supervised tokens; `applied` False: nothing changed."""

    loss: float
    grad_norm: float
    applied: bool
    bad_tensor: str | None
    step_s: float
    lanes_s: dict[str, float]


class Engine:
    """Trains `template`'s model in `store` as `plan` says.

    The update of a step is pending until the next program (train, evaluate, save) runs it first, layer by layer, or
    `flush` runs it alone. `applied_steps` counts the updates decided, the pending one included.
    """

    def __init__(
        self,
        template: ModelTemplate,
        store: SegmentStore,
        plan: Plan,
        numerics: Numerics,
        device: torch.device,
        *,
        optimizer_threads: int,
        chaos: Chaos | None = None,
    ) -> None:
        assert (numerics.ema_decay is not None) == ("ema" in store.state_kinds), "the average has a home if it is kept"
        self.plan = plan
        self.numerics = numerics
        self.applied_steps = 0
        self.trace = Trace(())  # of the last program
        self._device = device
        places = Places(template.spec, plan, store, device, template.compute_dtype, numerics.micro_batch_tokens)
        num_elements = numerics.micro_batch_tokens * template.spec.hidden_size
        self._waiting = WaitingInputs(
            plan.waiting_in_ram, plan.round_micro_batches, num_elements, template.compute_dtype, device
        )
        host_rule = HostRule(optimizer_threads)
        self._handlers = Handlers(
            template,
            store,
            places,
            self._waiting,
            with_average(host_rule, numerics.ema_decay, optimizer_threads),
            with_average(device_rule(device, host_rule), numerics.ema_decay, optimizer_threads),
            numerics.loss_chunk_tokens,
            numerics.label_smoothing,
        )
        self._chaos = chaos
        self._one_by_one = bool(os.environ.get(SYNC))
        if self._one_by_one:
            log.warning("%s is set: one op at a time, each waited for; the same bits, slower", SYNC)
        if chaos is None:
            lanes = drained_lanes(device) if self._one_by_one else lane_devices(device)
            table = self._handlers.table
        else:
            lanes, table = chaos.lanes(device), chaos.table(self._handlers.table, places.poison)
        take_workspaces(lanes[Lane.COMPUTE], device)
        self._executor = Executor(lanes, table)
        self._pending = False
        self._unfinished = False  # a program was begun and did not end
        self._schedules: dict[tuple[Program, int, bool], Schedule] = {}
        self._last_calls = frozenset[int]()  # of all of them: they are kept, so an id is of one op

    def train_step(
        self, micro_batches: Sequence[TokenBatch], num_supervised: int, hyper: optim.AdamW, step: int = 0
    ) -> StepResult:
        """Forward, backward and norm of one optimizer step; its update is left pending, or done in a second backward.

        `num_supervised` is the step's number of supervised tokens, over all micro-batches; it must be positive.
        `step`: the number of the step in its run, which names its noise and its dropout.
        """
        assert num_supervised > 0, "a step without supervised tokens has no loss"
        started = time.perf_counter()
        program = Step(
            micro_batches=[self._place(batch) for batch in micro_batches],
            inv_denominator=1.0 / num_supervised,
            hyper=hyper,
            next_step=self.applied_steps + 1,
            max_norm=self.numerics.max_grad_norm,
            disturb=self._noise_of(step),
            key_of=lambda micro_batch: key_of(self.numerics.seed, step, micro_batch),
        )
        lanes_s = self._run("train", program).busy_s()
        cell = self._handlers.cell
        assert cell is not None
        return StepResult(
            loss=cell.loss_sum / num_supervised,
            grad_norm=cell.norm,
            applied=cell.applies,
            bad_tensor=cell.bad_tensor,
            step_s=time.perf_counter() - started,
            lanes_s=lanes_s,
        )

    def evaluate(self, micro_batches: Sequence[TokenBatch]) -> float:
        """Sum of the token losses of `micro_batches`, with every pending update applied first.

        A program a round: a long evaluation set needs no more memory than a short one.
        """
        if not micro_batches:
            self.flush()
        total = 0.0
        for start in range(0, len(micro_batches), self.plan.round_micro_batches):
            group = micro_batches[start : start + self.plan.round_micro_batches]
            self._run("eval", Step(micro_batches=[self._place(batch) for batch in group]))
            names = [str(Place("loss", "", m)) for m in range(len(group))]
            for (loss,) in self._handlers.scalars.get(names):
                total += loss
        return total

    def save(self, write_segment: Callable[[str], None]) -> None:
        """Apply every pending update and call `write_segment(name)` for each segment as soon as it is final."""
        self._run("save", Step(write_segment=write_segment))

    def flush(self) -> None:
        """Apply every pending update."""
        if self._pending:
            self._run("flush", Step())

    def close(self) -> None:
        """Stop the lanes. A pending update is not applied: `flush` first."""
        self._executor.close()
        self._waiting.close()

    def schedule(self, program: Program, num_micro_batches: int) -> Schedule:
        """The schedule of `program` as it would run now."""
        key = (program, num_micro_batches, self._pending)
        if key not in self._schedules:
            schedule = build(self.plan, program, num_micro_batches, self._pending)
            self._schedules[key] = schedule = one_by_one(schedule) if self._one_by_one else schedule
            self._last_calls |= last_calls(schedule)
        return self._schedules[key]

    def _run(self, program: Program, step: Step) -> Trace:
        if self._unfinished:
            # some of its updates may have run and some not: nothing may be trained, evaluated or saved from this state
            raise RuntimeError("the engine stopped in the middle of a program; resume from a checkpoint")
        schedule = self.schedule(program, len(step.micro_batches))
        self._unfinished = True
        step.last_calls = self._last_calls
        self._handlers.step = step
        if self._chaos is not None:
            self._chaos.begin(schedule)
        self.trace = trace = self._executor.run(schedule)
        if program == "train":
            assert self._handlers.cell is not None
            self.applied_steps += self._handlers.cell.applies
        self._pending = program == "train"  # whatever was pending before, this program has applied
        self._unfinished = False  # last: Ctrl-C before this leaves nothing that could be updated twice
        return trace

    def _noise_of(self, step: int) -> Disturb:
        """NEFTune's noise of a step."""
        alpha, seed = self.numerics.neftune_alpha, self.numerics.seed
        if alpha is None:
            return undisturbed
        return lambda h_1TD, batch, micro_batch: with_noise(h_1TD, batch, alpha, seed, step, micro_batch)

    def _place(self, batch: TokenBatch) -> TokenBatch:
        return TokenBatch(*(tensor.to(self._device) for tensor in batch))

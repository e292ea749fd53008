"""The training loop, to be read aloud. A step's number counts from 1; `start_step` steps are already done."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatrain.config import RunConfig
from megatrain.data import MicroBatch, StepBatch
from megatrain.engine import Engine, StepResult
from megatrain.errors import ConfigError, UserError
from megatrain.models.batch import TokenBatch
from megatrain.optim import AdamW, LearningRateSchedule, count_warmup_steps, multiplier
from megatrain.train.metrics import Metrics
from megatrain.train.signals import StopRequest
from megatrain.train.watch import Watch

DIVERGED_STEPS = 3  # that were skipped at the end of a run, one after the other
TRACED_STEP = 3  # of a start: kernels are compiled and pools filled by then


class Steps(Protocol):
    """The data of a run: what each optimizer step trains on, by index from 0."""

    def step(self, index: int) -> StepBatch:
        """The batch of step `index`; the same for the same index, always."""
        ...


class Checkpoints(Protocol):
    """Where the state of a run is kept."""

    def save(self, step: int) -> bool:
        """Write everything after `step` steps; returns once it is acknowledged. False: `step` was saved before."""
        ...


@dataclass(frozen=True)
class Run:
    """All that the loop needs. `checkpoints` None: save_strategy "no". `trace`: where the ops of a warm step go."""

    config: RunConfig
    engine: Engine
    data: Steps
    num_steps: int
    start_step: int
    eval_micro_batches: Sequence[MicroBatch]
    checkpoints: Checkpoints | None
    metrics: Metrics
    watch: Watch
    trace: Path


@dataclass(frozen=True)
class Outcome:
    """How a run ended: after which step, and with which signal, if one stopped it.

    `skipped`: how many steps up to the last, one after the other, had a NaN or Inf and were not applied.
    """

    step: int
    signal: int | None
    skipped: int = 0

    @property
    def diverged(self) -> bool:
        """Whether the last steps were no accident of single rows."""
        return self.skipped >= DIVERGED_STEPS


def train(run: Run) -> Outcome:
    """Train from `start_step` to `num_steps`. Returns early, with everything saved, at SIGINT or SIGTERM, and when
    held-out losses stopped falling for as long as config allows."""
    config, schedule, watch = run.config, lr_schedule(run.config, run.num_steps), run.watch
    step, skipped = run.start_step, 0
    if watch.exhausted:
        run.metrics.say(f"{watch.verdict()}; nothing is left to do")
        return Outcome(step, None)
    if step == run.num_steps:
        run.metrics.say(f"all {step} steps are done; for more, raise max_steps or num_train_epochs, and --allow it")
        return Outcome(step, None)
    with StopRequest() as stop:
        if step == 0:
            evaluate(run, step)
        for step in range(run.start_step + 1, run.num_steps + 1):
            started = time.perf_counter()
            batch = run.data.step(step - 1)
            hyper = hyper_of(config, schedule, step - 1)
            result = run.engine.train_step(token_batches(batch.micro_batches), batch.num_supervised, hyper, step)
            run.metrics.step(step, batch, hyper.learning_rate, result, time.perf_counter() - started)
            if step == min(run.start_step + TRACED_STEP, run.num_steps):
                run.engine.trace.write(run.trace)
            skipped = 0 if result.applied else skipped + 1
            if skipped:
                stop_or_skip(run, step, batch, result)
            better = False
            if step == run.num_steps or (config.eval_steps and step % config.eval_steps == 0):
                better = evaluate(run, step)
            ends = step == run.num_steps or stop.signal is not None or watch.exhausted
            if ends or step % config.save_steps == 0 or (better and config.save_strategy == "best"):
                save(run, step)
            if ends:
                break
        if watch.exhausted and step < run.num_steps:
            run.metrics.say(watch.verdict())
        run.engine.flush()
    if step == run.num_steps and not run.engine.applied_steps:
        raise UserError(
            f"none of the {step} steps could be applied: each had a NaN or Inf, and on_nan is skip; the model is what "
            "it was before: lower learning_rate, or look at the data"
        )
    return Outcome(step, stop.signal, skipped)


def lr_schedule(config: RunConfig, num_steps: int) -> LearningRateSchedule:
    """The learning-rate schedule of a run of `num_steps` steps."""
    warmup_steps = count_warmup_steps(num_steps, config.warmup_steps, config.warmup_ratio)
    decay_steps = math.ceil(num_steps * config.decay_ratio)
    if config.lr_scheduler_type == "warmup_stable_decay" and warmup_steps + decay_steps > num_steps:
        raise ConfigError(
            f"{warmup_steps} steps of warm-up and {decay_steps} of decay do not fit into a run of {num_steps}; "
            "lower warmup_steps, warmup_ratio or decay_ratio, or train longer"
        )
    return LearningRateSchedule(
        kind=config.lr_scheduler_type,
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        min_ratio=config.min_lr_ratio,
    )


def hyper_of(config: RunConfig, schedule: LearningRateSchedule, index: int) -> AdamW:
    """AdamW's hyper-parameters at step `index`, counted from 0."""
    return AdamW(
        learning_rate=config.learning_rate * multiplier(schedule, index),
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        epsilon=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )


def token_batches(micro_batches: Sequence[MicroBatch]) -> list[TokenBatch]:
    """The same micro-batches as tensors, without a copy."""
    arrays = [(m.input_ids_T, m.position_ids_T, m.document_ids_T, m.labels_T) for m in micro_batches]
    return [TokenBatch(*map(torch.from_numpy, fields)) for fields in arrays]


def evaluate(run: Run, step: int) -> bool:
    """Loss per supervised token over the whole held-out set, if there is one. Whether it is the least so far."""
    if not run.eval_micro_batches:
        return False
    tokens = sum(m.num_supervised for m in run.eval_micro_batches)
    loss = run.engine.evaluate(token_batches(run.eval_micro_batches)) / tokens
    run.metrics.evaluation(step, loss, tokens)
    return run.watch.see(step, loss)


def save(run: Run, step: int) -> None:
    """Save after `step` steps; it is said only once it is acknowledged."""
    if run.checkpoints is not None and run.checkpoints.save(step):
        run.metrics.say(f"saved step {step}")


def stop_or_skip(run: Run, step: int, batch: StepBatch, result: StepResult) -> None:
    """What `on_nan` says about a step that was not applied; the message names all that is known."""
    samples = sorted({sample for m in batch.micro_batches for sample in m.sample_ids})
    shown = ", ".join(map(str, samples[:16])) + (" …" if len(samples) > 16 else "")
    where = f"first in {result.bad_tensor}" if result.bad_tensor else "in the loss alone"
    text = (
        f"step {step}: loss {result.loss} and gradient norm {result.grad_norm} are not finite, {where}; "
        f"samples {shown}; nothing was applied"
    )
    if run.config.on_nan == "stop":
        run.metrics.say(text)
        save(run, step - 1)
        raise UserError(f"{text}; lower learning_rate, look at these samples, or set on_nan: skip")
    run.metrics.say(f"{text}; skipped")

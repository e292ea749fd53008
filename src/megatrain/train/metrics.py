"""Metrics: every step becomes one object in metrics.jsonl, one line in log.txt, one on the terminal, and a row for
each tracker."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

import numpy as np
import torch

from megatrain.data import StepBatch
from megatrain.engine import StepResult
from megatrain.errors import UserError
from megatrain.memory import peak_rss_bytes
from megatrain.models.flops import hardware_flops, train_flops
from megatrain.models.spec import ModelSpec
from megatrain.schedule.plan import Plan
from megatrain.train.progress import Display, Now
from megatrain.train.trackers import Tracker, numbers_of

WARM_UP_STEPS = 2
ETA_STEPS = 20  # the time left goes by the mean of so many steps


@dataclass(frozen=True)
class Work:
    """What the arithmetic of a step is counted from. `peak_flops_per_s` None: not measured, so no share is claimed."""

    spec: ModelSpec
    plan: Plan
    peak_flops_per_s: float | None

    def figures(self, batch: StepBatch, step_s: float) -> dict[str, float | None]:
        """model_tflops (per second, useful work only), and the shares of the peak that useful and all work reach."""
        lengths = document_lengths(batch)
        padding = sum(len(m.input_ids_T) - m.num_tokens for m in batch.micro_batches)
        useful = train_flops(self.spec, lengths) / step_s
        how = (self.plan.recomputed, self.plan.attention_kept, self.plan.backwards)
        done = hardware_flops(self.spec, lengths, padding, *how) / step_s
        peak = self.peak_flops_per_s
        return {
            "model_tflops": round(useful / 1e12, 6),
            "mfu": None if peak is None else round(useful / peak, 6),
            "hfu": None if peak is None else round(done / peak, 6),
        }


def document_lengths(batch: StepBatch) -> list[int]:
    """Tokens of every document of a step, padding left out."""
    counts = [np.bincount(m.document_ids_T[: m.num_tokens]) for m in batch.micro_batches]
    return [int(length) for count in counts for length in count]


class Metrics:
    """Writes what happened. Nothing is filtered: a NaN is logged as "nan"."""

    def __init__(
        self,
        jsonl: Path,
        log: Path,
        screen: Display,
        device: torch.device,
        work: Work,
        *,
        logging_steps: int,
        num_steps: int,
    ) -> None:
        self._jsonl = jsonl.open("ab", buffering=0)  # what the disk refuses is not tried again at the end
        self._log = log.open("ab", buffering=0)
        self._screen = screen
        self._device = device
        self._work = work
        self._logging_steps = logging_steps
        self._num_steps = num_steps
        self._steps_s: list[float] = []
        self._trackers: list[Tracker] = []

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._screen.close()
        for tracker in self._trackers:
            tracker.close()
        self._jsonl.close()
        self._log.close()

    def track(self, open_trackers: Callable[[Callable[[str], None]], list[Tracker]]) -> None:
        """Send every row to these trackers too, until the end; they are given `say`."""
        self._trackers = open_trackers(self.say)

    def say(self, text: str) -> None:
        """One line for the terminal and the log."""
        _append(self._log, text)
        self._screen.line(text)

    def step(self, step: int, batch: StepBatch, learning_rate: float, result: StepResult, step_s: float) -> None:
        """Record one optimizer step that took `step_s` from asking for its data to its last lane."""
        row = self.row(step, batch, learning_rate, result, step_s)
        self._write(row)
        self._steps_s.append(step_s)
        recent_s = self._steps_s[-ETA_STEPS:]
        now = Now(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=learning_rate,
            tokens_per_s=batch.num_tokens / step_s,
            step_s=step_s,
            mfu=row["mfu"],
            lanes_s=result.lanes_s,
            peak_bytes={
                "hbm": row["peak_hbm_bytes"],
                "ram": row["peak_ram_bytes"],
                "disk": row["disk_written_bytes"] or 0,
            },
            eta_s=(self._num_steps - step) * sum(recent_s) / len(recent_s),
        )
        if step % self._logging_steps == 0:
            self.say(now.line())
        self._screen.live(now)

    @property
    def usual_step_s(self) -> float | None:
        """The median step, the first two left out: layers compile, memory is touched. None until there is another."""
        later_s = self._steps_s[WARM_UP_STEPS:]
        return median(later_s) if later_s else None

    def _write(self, row: dict[str, Any]) -> None:
        _append(self._jsonl, json.dumps(row))
        for tracker in self._trackers:
            tracker.log(row["step"], numbers_of(row))

    def row(
        self, step: int, batch: StepBatch, learning_rate: float, result: StepResult, step_s: float
    ) -> dict[str, Any]:
        """The object that metrics.jsonl gets."""
        cuda = self._device.type == "cuda"
        return {
            "step": step,
            "loss": _json_number(result.loss),
            "grad_norm": _json_number(result.grad_norm),
            "lr": learning_rate,
            "applied": result.applied,
            "tokens": batch.num_tokens,
            "supervised_tokens": batch.num_supervised,
            "step_s": round(step_s, 6),
            "tokens_per_s": round(batch.num_tokens / step_s, 3),
            **self._work.figures(batch, step_s),
            "lanes": {lane: round(seconds, 6) for lane, seconds in result.lanes_s.items()},
            "peak_hbm_bytes": torch.cuda.max_memory_reserved(self._device) if cuda else 0,
            "peak_ram_bytes": peak_rss_bytes(),
            "disk_written_bytes": written_bytes(),
        }

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Record a held-out loss."""
        self.say(f"step {step}  eval_loss {loss:.4f}  ({tokens} tokens)")
        self._write({"step": step, "eval_loss": _json_number(loss), "eval_tokens": tokens})


def _append(file: FileIO, line: str) -> None:
    """One more line; UserError if the disk does not take it."""
    try:
        file.write(f"{line}\n".encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(
            f"{file.name} cannot be written: {error.strerror}; free disk space, then megatrain resume "
            f"{Path(str(file.name)).parent}: the last step that was said to be saved stands"
        ) from error


def written_bytes(process: Path = Path("/proc/self/io")) -> int | None:
    """Bytes this process has sent to storage since it started; None where the kernel does not count them."""
    if not process.exists():
        return None
    return int(process.read_text().partition("\nwrite_bytes: ")[2].partition("\n")[0])


def _json_number(value: float) -> float | str:
    """JSON has no NaN and no Inf: they become the words "nan", "inf" and "-inf"."""
    return value if math.isfinite(value) else str(value)

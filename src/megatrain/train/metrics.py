"""Metrics: every step becomes one object in metrics.jsonl, one line in log.txt and one on the terminal."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from megatrain.data import StepBatch
from megatrain.engine import StepResult
from megatrain.memory import peak_rss_bytes
from megatrain.train.progress import Display


@dataclass(frozen=True)
class Flops:
    """Arithmetic of a run, for the figures of each step. `peak_per_s` None: not measured, so no MFU is claimed."""

    per_token: float  # model FLOPs of one token, forward and backward, without recomputation
    peak_per_s: float | None


class Metrics:
    """Writes what happened. Nothing is filtered: a NaN is logged as "nan"."""

    def __init__(
        self, jsonl: Path, log: Path, screen: Display, device: torch.device, flops: Flops, logging_steps: int
    ) -> None:
        self._jsonl = jsonl.open("a", encoding="utf-8")
        self._log = log.open("a", encoding="utf-8")
        self._screen = screen
        self._device = device
        self._flops = flops
        self._logging_steps = logging_steps

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._screen.close()
        self._jsonl.close()
        self._log.close()

    def say(self, text: str) -> None:
        """One line for the terminal and the log."""
        self._log.write(text + "\n")
        self._log.flush()
        self._screen.line(text)

    def step(self, step: int, batch: StepBatch, learning_rate: float, result: StepResult, step_s: float) -> None:
        """Record one optimizer step that took `step_s` from asking for its data to its last lane."""
        row = self.row(step, batch, learning_rate, result, step_s)
        self._jsonl.write(json.dumps(row) + "\n")
        self._jsonl.flush()
        text = (
            f"step {step}  loss {result.loss:.4f}  grad_norm {result.grad_norm:.3f}  lr {learning_rate:.2e}  "
            f"{row['tokens_per_s']:,.0f} tok/s  {step_s:.2f} s/step"
        )
        if step % self._logging_steps == 0:
            self.say(f"{text}  [{lanes_text(result.lanes_s)}]")
        self._screen.live(step, f"loss {result.loss:.4f}  {row['tokens_per_s']:,.0f} tok/s  {step_s:.2f} s/step")

    def row(
        self, step: int, batch: StepBatch, learning_rate: float, result: StepResult, step_s: float
    ) -> dict[str, object]:
        """The object that metrics.jsonl gets."""
        flops = self._flops.per_token * batch.num_tokens / step_s
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
            "model_tflops": round(flops / 1e12, 6),
            "mfu": None if self._flops.peak_per_s is None else round(flops / self._flops.peak_per_s, 6),
            "lanes": {lane: round(seconds, 6) for lane, seconds in result.lanes_s.items()},
            "peak_hbm_bytes": torch.cuda.max_memory_reserved(self._device) if cuda else 0,
            "peak_ram_bytes": peak_rss_bytes(),
        }

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Record a held-out loss."""
        self.say(f"step {step}  eval_loss {loss:.4f}  ({tokens} tokens)")
        self._jsonl.write(json.dumps({"step": step, "eval_loss": _json_number(loss), "eval_tokens": tokens}) + "\n")
        self._jsonl.flush()


def lanes_text(lanes_s: dict[str, float]) -> str:
    """Busy seconds of the lanes that did something: "compute 1.20 host 0.31"."""
    return " ".join(f"{lane} {seconds:.2f}" for lane, seconds in lanes_s.items() if seconds >= 0.005)


def _json_number(value: float) -> float | str:
    """JSON has no NaN and no Inf: they become the words "nan", "inf" and "-inf"."""
    return value if math.isfinite(value) else str(value)

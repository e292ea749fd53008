"""What a run folder tells about its run. Everything is optional but the config: a run may be young, or have died."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.config import RunConfig, read_config
from megatrain.errors import CheckpointError

Metrics = tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]  # training rows, evaluation rows
SAMPLES = "samples.json"  # below report/
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Sample:
    """What a model said to `prompt` after `step` steps; step 0 is the base model."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Record:
    """A run as its folder shows it. `steps` and `evals`: rows of metrics.jsonl, one a step, numbers as numbers."""

    path: Path
    config: RunConfig
    steps: tuple[dict[str, Any], ...]
    evals: tuple[dict[str, Any], ...]
    plan: dict[str, Any] | None
    environment: dict[str, Any] | None
    checkpoints: tuple[Checkpointed, ...]
    samples: tuple[Sample, ...]

    @property
    def best(self) -> int | None:
        """The checkpoint with the lowest eval loss; None where no checkpoint was evaluated."""
        return _lowest(self.evals, [saved.step for saved in self.checkpoints])


@dataclass(frozen=True)
class Checkpointed:
    """A checkpoint as its manifest lists it; nothing of it is read."""

    step: int
    path: Path  # relative to the run folder
    num_bytes: int


def read_record(path: Path) -> Record:
    """The record of the run in `path`. Reads JSON and YAML only."""
    steps, evals = read_metrics(path)
    return Record(
        path=path,
        config=read_config(path / "config.yaml"),
        steps=steps,
        evals=evals,
        plan=_json_of(path / "plan.json"),
        environment=_json_of(path / "env.json"),
        checkpoints=_checkpoints_of(path),
        samples=_samples_of(path),
    )


def read_metrics(path: Path) -> Metrics:
    """(training rows, evaluation rows) of metrics.jsonl; the later of two rows of one step counts."""
    file = path / "metrics.jsonl"
    steps: dict[int, dict[str, Any]] = {}
    evals: dict[int, dict[str, Any]] = {}
    if file.is_file():
        for line in file.read_text("utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # a run that is writing now may be halfway through its last line
                row = {key: _number(value) for key, value in json.loads(line).items()}
                table = evals if "eval_loss" in row else steps
                table[row["step"]] = row
    return tuple(steps[step] for step in sorted(steps)), tuple(evals[step] for step in sorted(evals))


def best_step(path: Path, metrics: Metrics, kept: Sequence[int]) -> int:
    """The step among `kept` that BEST names, or else the one with the lowest eval loss; CheckpointError without one."""
    hint = path / "BEST"
    if hint.is_file():
        named = hint.read_text("utf-8").strip().rpartition("step-")[2]
        if named.isdecimal() and int(named) in kept:
            return int(named)
    best = _lowest(metrics[1], kept)
    if best is None:
        raise CheckpointError(
            f"{path} has no evaluated checkpoint, so none is best; it keeps {', '.join(map(str, kept))}: name one, "
            "and set eval_dataset and eval_steps in the next run"
        )
    return best


def _lowest(evals: Sequence[dict[str, Any]], kept: Sequence[int]) -> int | None:
    """The step of `kept` with the lowest eval loss, the first of equals."""
    losses = {row["step"]: row["eval_loss"] for row in evals if not math.isnan(row["eval_loss"])}
    rated = [step for step in kept if step in losses]
    return min(rated, key=lambda step: (losses[step], step)) if rated else None


def _number(value: Any) -> Any:
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _json_of(path: Path) -> dict[str, Any] | None:
    """A JSON object of the run; None if it is not there, CheckpointError if it is something else."""
    if not path.is_file():
        return None
    try:
        members = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); put it back from a copy, or move it away") from error
    if not isinstance(members, dict):
        raise CheckpointError(f"{path} is damaged (no JSON object); put it back from a copy, or move it away")
    return members


def _checkpoints_of(path: Path) -> tuple[Checkpointed, ...]:
    found = []
    for manifest in path.glob("checkpoints/step-*/manifest.json"):
        members = _json_of(manifest) or {}
        if not members.keys() >= {"files", "step"}:
            raise CheckpointError(f"{manifest} is damaged (it lists no files); move its folder out of the run")
        num_bytes = sum(size for blocks in members["files"].values() for size, _ in blocks)
        found.append(Checkpointed(members["step"], manifest.parent.relative_to(path), num_bytes))
    return tuple(sorted(found, key=lambda checkpoint: checkpoint.step))


def _samples_of(path: Path) -> tuple[Sample, ...]:
    members = _json_of(path / "report" / SAMPLES)
    return () if members is None else tuple(Sample(**sample) for sample in members["samples"])

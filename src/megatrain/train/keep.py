"""Keeper: saves a run. Besides tensors: which step it is after, how many were applied, what evaluations said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.checkpoint import Checkpoint, CheckpointWriter, save_checkpoint
from megatrain.engine import Engine
from megatrain.errors import CheckpointError
from megatrain.train.watch import Watch


class Keeper:
    """The Checkpoints of a run. Data need no position of their own: the step number is one."""

    def __init__(self, writer: CheckpointWriter, engine: Engine, watch: Watch, saved_step: int) -> None:
        self._writer = writer
        self._engine = engine
        self._watch = watch
        self._saved_step = saved_step

    def save(self, step: int) -> bool:
        """Write everything after `step` steps; returns once it is acknowledged. False: `step` was saved before."""
        if step == self._saved_step:
            return False
        state = {"step": step, "applied_steps": self._engine.applied_steps, **self._watch.saving(step)}
        save_checkpoint(self._writer, step, self._engine.save, state)
        self._saved_step = step
        return True


def refuse_other_run(checkpoint: Checkpoint, facts: Mapping[str, Any], allowed: frozenset[str]) -> None:
    """CheckpointError if a fact of the run (data, versions) is not what the checkpoint was made with."""
    saved = checkpoint.manifest["run"]
    for key, value in facts.items():
        if saved.get(key) != value and key not in allowed:
            raise CheckpointError(
                f"{key} is {value!r}, but {checkpoint.path} was made with {saved.get(key)!r}: the steps to come would "
                f"not be those of that run; restore it, or resume with --allow {key}"
            )

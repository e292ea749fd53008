"""Opens what a verb is pointed at: a run's checkpoint or a Hugging Face folder, read only, without optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.checkpoint import Files, load_weights, open_step
from megatrain.cli.assemble import Planned, planned, store_of
from megatrain.cli.pointed import base_of, is_run, steps_asked
from megatrain.config import RunConfig
from megatrain.models.spec import ModelSpec
from megatrain.planner import memory_table, refuse_misfit, search
from megatrain.store import SegmentStore


@dataclass(frozen=True)
class Source:
    """A model to read: a Hugging Face folder. `step` None: no run, or a run that kept no checkpoints; 0: its base."""

    folder: Path
    step: int | None

    @property
    def label(self) -> str:
        """How a table calls it."""
        return str(self.folder) if self.step is None else "base" if self.step == 0 else f"step {self.step}"


def sources_of(path: Path, wanted: Sequence[str]) -> list[Source]:
    """The checkpoints that `wanted` names (numbers, latest, best, base, all), verified; or the model folder itself."""
    steps = steps_asked(path, wanted)
    if not steps:
        return [Source(path / "model" if is_run(path) else path, None)]
    return [Source(_folder_of(path, step), step) for step in steps]


def _folder_of(path: Path, step: int) -> Path:
    """The model folder of a step, every byte of it verified; the base model for step 0."""
    return open_step(path, step, Files(), below="model/").path / "model" if step else base_of(path)


def without_state(spec: ModelSpec) -> ModelSpec:
    """The same model with nothing to train: weights alone are held, at 2 or 4 bytes a parameter instead of 16."""
    segments = tuple(
        replace(segment, tensors=tuple(replace(tensor, trainable=False) for tensor in segment.tensors))
        for segment in spec.segments
    )
    return replace(spec, segments=segments)


def planned_to_read(config: RunConfig, folder: Path, *, cache_tokens: int = 0) -> Planned:
    """A plan that holds the weights of `folder` and no state; PlanError, with the numbers, if they do not fit.

    `cache_tokens`: tokens whose keys and values will be kept on a GPU besides.
    """
    of_training = {"save_strategy": "no", "activations": "recompute", "clip_mode": "auto", "weight_slots": None}
    changes = {"model": str(folder), **of_training}
    run = planned(config.model_copy(update=changes))
    spec = without_state(run.spec)
    machine = replace(run.machine, hbm_free_bytes=run.machine.hbm_free_bytes - _cache_bytes(run, cache_tokens))
    run = replace(run, spec=spec, machine=machine)
    plan = search(run.question)
    refuse_misfit(run.question, plan)
    return replace(run, plan=plan, table=memory_table(run.question, plan))


def _cache_bytes(run: Planned, num_tokens: int) -> int:
    """Of keys and values, counted with the query heads: an upper bound. At most a quarter of what is free."""
    each = sum(2 * shape.num_heads * shape.head_size for shape in run.spec.attention)
    size = 2 if run.config.precision == "bf16" else 4
    return min(num_tokens * each * size, run.machine.hbm_free_bytes // 4)


def filled_store(run: Planned) -> SegmentStore:
    """The weights of the folder that `run` was planned for, in their homes."""
    store = store_of(run)
    load_weights(Path(run.config.model), store, run.spec)
    return store

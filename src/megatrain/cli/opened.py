"""Opens what a verb is pointed at: a run's checkpoint or a Hugging Face folder, read only, without optimizer state."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.checkpoint import Files, load_weights, open_step, saved_steps
from megatrain.cli.assemble import Planned, planned, store_of
from megatrain.config import RunConfig, read_config
from megatrain.config_spellings import keys_of, refuse_unknown
from megatrain.errors import CheckpointError, ConfigError, ModelError
from megatrain.models.spec import ModelSpec
from megatrain.planner import plan_run, refuse_misfit
from megatrain.report import best_step, read_metrics
from megatrain.store import SegmentStore
from megatrain.train.run_folder import why_no_run


@dataclass(frozen=True)
class Source:
    """A model to read: a Hugging Face folder. `step` None: no run, or a run that kept no checkpoints; 0: its base."""

    folder: Path
    step: int | None

    @property
    def label(self) -> str:
        """How a table calls it."""
        return str(self.folder) if self.step is None else "base" if self.step == 0 else f"step {self.step}"


def is_run(path: Path) -> bool:
    """Whether `path` is a run folder; ModelError if it is no model folder either."""
    if (path / "config.yaml").is_file():
        return True
    if (path / "config.json").is_file():
        return False
    if path.is_dir() and ((path / "checkpoints").is_dir() or path.parent.name == "checkpoints"):
        raise CheckpointError(why_no_run(path))
    what = "is" if path.is_dir() else "is a file," if path.exists() else "is not there:"
    raise ModelError(
        f"{path} {what} neither a run folder (config.yaml) nor a Hugging Face model folder (config.json); give one of "
        "them"
    )


def refuse_unheeded(words: Sequence[str], heeded: Collection[str], why: str) -> None:
    """ConfigError if a `key=value` word sets a key that the verb would pass over."""
    for key in sorted(keys_of(words) - set(heeded)):
        if key not in RunConfig.model_fields:
            refuse_unknown(key, "command line", RunConfig.model_fields)
        raise ConfigError(f"{key} on the command line would change nothing here: {why}")


def run_config(path: Path, words: Sequence[str] = ()) -> RunConfig:
    """The config of a run folder, with `key=value` words, for where the folder is now."""
    if not (path / "config.yaml").is_file():
        raise CheckpointError(why_no_run(path))
    return read_config(path / "config.yaml", words).model_copy(update={"output_dir": str(path.absolute())})


def config_of(path: Path, words: Sequence[str], heeded: Collection[str] = RunConfig.model_fields) -> RunConfig:
    """The config to read `path` with: the run's own, or the defaults for a model folder; `words` replace keys.

    Words of other keys than `heeded` are a ConfigError.
    """
    refuse_unheeded(words, heeded, f"leave it out; heeded are {', '.join(sorted(heeded))}")
    given = keys_of(words)
    if is_run(path):
        config = read_config(path / "config.yaml", words)
        if config.device != "cpu":
            return config
        asked = {key: value for key, value in config if key in given}  # what was asked for stays a wish
        return on_cpu(config).model_copy(update=asked)
    return read_config(None, [f"model={json.dumps(str(path))}", 'dataset="-"', *words])


def on_cpu(config: RunConfig) -> RunConfig:
    """The same on a CPU, without what only a GPU has."""
    memory = config.memory.model_copy(update={"hbm": None})
    return config.model_copy(update={"device": "cpu", "compile": False, "memory": memory})


def sources_of(path: Path, wanted: Sequence[str]) -> list[Source]:
    """The checkpoints that `wanted` names (numbers, latest, best, base, all), verified; or the model folder itself."""
    if not is_run(path):
        if wanted and list(wanted) != ["latest"]:
            raise ConfigError(f"step is {wanted[0]!r}, but {path} is a model folder, not a run; leave --step out")
        return [Source(path, None)]
    steps = saved_steps(path)
    found: dict[int, Source] = {}
    for word in wanted or ["latest"]:
        if word == "latest" and not steps and (path / "model" / "config.json").is_file():
            return [Source(path / "model", None)]
        for step in steps_of(path, word, steps):
            found[step] = Source(_folder_of(path, step), step)
    return [found[step] for step in sorted(found)]


def steps_of(path: Path, word: str, steps: Sequence[int]) -> list[int]:
    """Which of the run's `steps` a word means: a number, latest, best, all; base is step 0."""
    if word == "base":
        return [0]
    if not steps:
        raise CheckpointError(f"{path} holds no checkpoint yet; train it first, or give --step base")
    if word == "latest":
        return [steps[-1]]
    if word == "all":
        return list(steps)
    if word == "best":
        return [best_step(path, read_metrics(path), steps)]
    if not word.isdecimal():
        raise ConfigError(f"step is {word!r}; give a number, latest, best, base or all")
    if int(word) not in steps:
        kept = ", ".join(map(str, steps))
        raise CheckpointError(f"{path} holds no checkpoint of step {word}; it holds {kept}")
    return [int(word)]


def _folder_of(path: Path, step: int) -> Path:
    """The model folder of a step, every byte of it verified; the base model for step 0."""
    if step:
        return open_step(path, step, Files(), below="model/").path / "model"
    base = Path(read_config(path / "config.yaml").model)
    if not (base / "config.json").is_file():
        raise ModelError(f"the run started from {base}, which is not there any more; give another --step")
    return base


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
    changes = {"model": str(folder), "save_strategy": "no", "activations": "recompute", "weight_slots": None}
    run = planned(config.model_copy(update=changes))
    spec = without_state(run.spec)
    machine = replace(run.machine, hbm_free_bytes=run.machine.hbm_free_bytes - _cache_bytes(run, cache_tokens))
    plan, table = plan_run(spec, run.config, machine)
    refuse_misfit(spec, run.config, machine, table)
    return replace(run, spec=spec, plan=plan, table=table, machine=machine)


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

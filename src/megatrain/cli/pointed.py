"""What `eval`, `chat`, `export`, `report` and `resume` are pointed at, and the words they heed. No torch: a mistake is
answered before it is imported."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

from megatrain.cli.inputs import refuse_no_eval_rows
from megatrain.cli.named import local
from megatrain.config import RunConfig, read_config
from megatrain.config_run import run_config, saved_steps, why_no_run
from megatrain.config_spellings import keys_of, refuse_unknown
from megatrain.errors import CheckpointError, ConfigError, ModelError
from megatrain.report import best_step, read_metrics

# Keys of the command line that an evaluation heeds; the harness reads the model with transformers, not with us.
EVAL_KEYS = (
    "eval_dataset",
    "max_length",
    "packing",
    "truncation",
    "assistant_only_loss",
    "train_roles",
    "precision",
    "micro_batch_tokens",
    "loss_chunk_tokens",
    "deterministic",
    "compile",
    "allow_unproven",
    "device",
    "memory",
    "round_micro_batches",
)
HARNESS_KEYS = ("device", "precision", "allow_unproven")
CHAT_KEYS = ("device", "memory", "precision", "allow_unproven")
RESUME_KEYS = RunConfig.model_fields.keys() - {"output_dir"}


def located(path: Path) -> Path:
    """`path`, or, where it is a name on the hub (ORG/NAME, ORG/NAME@REVISION), its files, fetched once."""
    return Path(local(str(path), "model"))


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
        "them, or a name on the hub (ORG/NAME)"
    )


def config_to_resume(path: Path, words: Sequence[str]) -> RunConfig:
    """The config of the run in `path`, which may have been moved."""
    why = "a run goes on in its own folder; to go elsewhere, move or copy that folder first"
    refuse_unheeded(words, RESUME_KEYS, why)
    return run_config(path, words)


def config_to_evaluate(
    path: Path, words: Sequence[str], dataset: str | None, steps: Sequence[str], *, harness: bool
) -> RunConfig:
    """The config to evaluate `path` with; the mistakes in what was asked."""
    if dataset is not None:
        words = [*words, f"eval_dataset={json.dumps(dataset)}"]
    config = config_of(path, words, HARNESS_KEYS if harness else EVAL_KEYS)
    if config.eval_dataset is None and not harness:
        raise ConfigError(f"{path} names no eval_dataset; give one with --dataset FILE")
    steps_asked(path, steps)
    if not harness:  # which brings data of its own
        refuse_no_eval_rows(config)
    return config


def config_to_chat(path: Path, words: Sequence[str], step: str) -> RunConfig:
    """The config to talk to one checkpoint of `path` with."""
    config = config_of(path, words, CHAT_KEYS)
    if step == "all":
        raise ConfigError("step is 'all'; a conversation takes one checkpoint: a number, latest, best or base")
    steps_asked(path, [step])
    return config


def refuse_unheeded(words: Sequence[str], heeded: Collection[str], why: str) -> None:
    """ConfigError if a `key=value` word sets a key that the verb would pass over."""
    for word in words:
        if "=" not in word:
            raise ConfigError(f"command line '{word}': write key=value, for example device=cpu")
    for key in sorted(keys_of(words) - set(heeded)):
        if key not in RunConfig.model_fields:
            refuse_unknown(key, "command line", RunConfig.model_fields)
        raise ConfigError(f"{key} on the command line would change nothing here: {why}")


def config_of(path: Path, words: Sequence[str], heeded: Collection[str] = RunConfig.model_fields) -> RunConfig:
    """The config to read `path` with: the run's own, or the defaults for a model folder; `words` replace keys.

    Words of other keys than `heeded` are a ConfigError.
    """
    refuse_unheeded(words, heeded, f"leave it out; heeded are {', '.join(sorted(heeded))}")
    given = keys_of(words)
    if is_run(path):
        config = run_config(path, words)
        if config.device != "cpu":
            return config
        asked = {key: value for key, value in config if key in given}  # what was asked for stays a wish
        return on_cpu(config).model_copy(update=asked)
    return read_config(None, [f"model={json.dumps(str(path))}", 'dataset="-"', *words])


def on_cpu(config: RunConfig) -> RunConfig:
    """The same on a CPU, without what only a GPU has."""
    memory = config.memory.model_copy(update={"hbm": None})
    return config.model_copy(update={"device": "cpu", "compile": False, "memory": memory})


def steps_asked(path: Path, wanted: Sequence[str]) -> list[int]:
    """The steps that `wanted` names (numbers, latest, best, base, all), lowest first; 0 is the model it started from.

    None: a model folder, or a run that kept its final model alone.
    """
    if not is_run(path):
        if wanted and list(wanted) != ["latest"]:
            raise ConfigError(f"step is {wanted[0]!r}, but {path} is a model folder, not a run; leave --step out")
        return []
    steps = saved_steps(path)
    found: set[int] = set()
    for word in wanted or ["latest"]:
        if word == "latest" and not steps and (path / "model" / "config.json").is_file():
            return []
        found.update(steps_of(path, word, steps))
    if 0 in found:
        base_of(path)
    return sorted(found)


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


def base_of(path: Path) -> Path:
    """The folder of the model that the run in `path` started from."""
    base = Path(read_config(path / "config.yaml").model)
    if not (base / "config.json").is_file():
        raise ModelError(f"the run started from {base}, which is not there any more; give another --step")
    return base

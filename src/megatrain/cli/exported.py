"""What `megatrain export` is asked for, checked word by word. No torch: a mistake is answered before it is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from megatrain.cli.folders import refuse_export_target
from megatrain.cli.pointed import is_run, steps_of
from megatrain.config_run import saved_steps
from megatrain.config_values import parse_size
from megatrain.errors import CheckpointError, ConfigError
from megatrain.report import Kind

DTYPES = ("bf16", "fp16", "fp32")
SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MIN_SHARD_BYTES = 1 << 20


@dataclass(frozen=True)
class Export:
    """A checkpoint of the run in `path` as the new folder `target`. `ema`: the average of its weights."""

    path: Path
    target: Path
    step: int
    dtype: str  # one of DTYPES
    shard_bytes: int
    kind: Kind
    ema: bool


def export_asked(
    path: Path, target: Path, step: str, dtype: str | None, shard_size: str, form: str, *, ema: bool
) -> Export:
    """The words of the command line as an Export."""
    if not is_run(path):
        raise CheckpointError(f"{path} is a model folder already; export takes a run folder")
    kind = _kind_of(form)
    if ema and kind == "dcp":
        raise ConfigError("--ema writes the averaged weights as a model folder; leave --format dcp out")
    chosen = _dtype_of(dtype, kind)
    shard_bytes = _shard_bytes(shard_size)
    refuse_export_target(target)
    steps = saved_steps(path)
    if not steps and (path / "model" / "config.json").is_file():
        raise CheckpointError(
            f"{path} kept no checkpoints (save_strategy: no); its final model is {path / 'model'}, a Hugging Face "
            "folder: copy that"
        )
    if not steps:
        raise CheckpointError(f"{path} holds no checkpoint to export yet; train it first")
    if step in ("base", "all"):
        raise ConfigError(f"step is {step!r}; an export takes one checkpoint: a number, latest or best")
    return Export(path, target, steps_of(path, step, steps)[0], chosen, shard_bytes, kind, ema)


def _kind_of(word: str) -> Kind:
    for kind in get_args(Kind):
        if word == kind:
            return kind
    raise ConfigError(f"format is {word!r}; use hf or dcp")


def _dtype_of(word: str | None, kind: str) -> str:
    """bf16 unless another is asked for; a folder to train on from holds the fp32 masters and nothing less."""
    if kind == "dcp":
        if word is not None and SPELLINGS.get(word.lower(), word.lower()) != "fp32":
            raise ConfigError(f"dtype is {word!r}, but --format dcp writes the fp32 masters; leave --dtype out")
        return "fp32"
    chosen = "bf16" if word is None else SPELLINGS.get(word.lower(), word.lower())
    if chosen not in DTYPES:
        raise ConfigError(f"dtype is {word!r}; use {', '.join(DTYPES)}")
    return chosen


def _shard_bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"shard-size is {text!r}; {error}") from None
    if not isinstance(size, int) or size < MIN_SHARD_BYTES:
        raise ConfigError(f"shard-size is {text!r}; give at least 1MiB")
    return size

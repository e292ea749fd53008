"""`megatrain export`: a checkpoint as a Hugging Face folder, or as a torch.distributed.checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import torch

from megatrain.checkpoint import (
    Checkpoint,
    has_average,
    open_step,
    restore,
    saved_steps,
    take_averages,
    write_dcp_folder,
    write_hf_folder,
)
from megatrain.cli.assemble import Planned, planned, store_of
from megatrain.cli.folders import refuse_export_target
from megatrain.cli.opened import is_run, on_cpu, run_config, steps_of
from megatrain.cli.shortage import explained_shortage
from megatrain.config import RunConfig
from megatrain.config_values import parse_size
from megatrain.errors import CheckpointError, ConfigError
from megatrain.optim import AdamW
from megatrain.planner import refuse_misfit
from megatrain.report import Kind, card, read_record

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MIN_SHARD_BYTES = 1 << 20
ANY_DECAY = 0.5  # an export makes room for an average and updates none


def export(
    path: Path, target: Path, step: str, dtype: str | None, shard_size: str, form: str, *, ema: bool = False
) -> int:
    """Write a checkpoint of the run in `path` to the new folder `target`. `ema`: the average of its weights."""
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
    checkpoint = open_step(path, steps_of(path, step, steps)[0])
    if ema and not has_average(checkpoint):
        raise CheckpointError(
            f"step {checkpoint.step} of {path} has no average of the weights: it was trained without ema_decay; leave "
            "--ema out"
        )
    changes = {"activations": "recompute", "save_strategy": "no", "ema_decay": ANY_DECAY if ema else None}
    config = on_cpu(run_config(path)).model_copy(update=changes)
    run = planned(config, checkpoint.path / "model")
    refuse_misfit(run.spec, run.config, run.machine, run.table)
    said = f"{chosen}, the running average (ema_decay)" if ema else chosen
    readme = card(read_record(path), checkpoint.step, checkpoint.manifest, kind, said).encode()
    with explained_shortage(run):
        _write(run, checkpoint, target, kind, DTYPES[chosen], shard_bytes, {"README.md": readme})
    print(f"step {checkpoint.step} of {path} as {said}{' with AdamW state' if kind == 'dcp' else ''}: {target}")
    return 0


def _write(
    run: Planned,
    checkpoint: Checkpoint,
    target: Path,
    kind: Kind,
    dtype: torch.dtype,
    shard_bytes: int,
    documents: Mapping[str, bytes],
) -> None:
    store = store_of(run)
    restore(store, checkpoint)
    if "ema" in store.state_kinds:
        take_averages(store)
    parts = (target, store, run.spec, run.hf_config, run.source)
    if kind == "hf":
        write_hf_folder(*parts, dtype=dtype, shard_bytes=shard_bytes, documents=documents)
    else:
        write_dcp_folder(*parts, _hyper(run.config), checkpoint.trainer_state["applied_steps"], documents)
    store.close()


def _kind_of(word: str) -> Kind:
    for kind in get_args(Kind):
        if word == kind:
            return kind
    raise ConfigError(f"format is {word!r}; use hf or dcp")


def _dtype_of(word: str | None, kind: str) -> str:
    """bf16 unless another is asked for; a folder to train on from holds the fp32 masters and nothing less."""
    if kind == "dcp":
        if word is not None and SPELLINGS.get(word, word) != "fp32":
            raise ConfigError(f"dtype is {word!r}, but --format dcp writes the fp32 masters; leave --dtype out")
        return "fp32"
    chosen = "bf16" if word is None else SPELLINGS.get(word, word)
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


def _hyper(config: RunConfig) -> AdamW:
    """The settings of AdamW with the peak learning rate."""
    return AdamW(
        learning_rate=config.learning_rate,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        epsilon=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )

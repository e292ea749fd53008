"""`megatrain export`: a checkpoint as a Hugging Face folder, or as a torch.distributed.checkpoint to go on from."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import torch

from megatrain.checkpoint import open_step, restore, saved_steps, write_dcp_folder, write_hf_folder
from megatrain.cli.assemble import planned, run_config, store_of
from megatrain.cli.opened import is_run, steps_of
from megatrain.config import RunConfig
from megatrain.config_values import parse_size
from megatrain.errors import CheckpointError, ConfigError
from megatrain.optim import AdamW
from megatrain.planner import refuse_misfit
from megatrain.report import Kind, card, read_record

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
MIN_SHARD_BYTES = 1 << 20


def export(path: Path, target: Path, step: str, dtype: str | None, shard_size: str, form: str) -> int:
    """Write a checkpoint of the run in `path` to the new folder `target`."""
    if not is_run(path):
        raise CheckpointError(f"{path} is a model folder already; export takes a run folder")
    kind = _kind_of(form)
    chosen = _dtype_of(dtype, kind)
    shard_bytes = _shard_bytes(shard_size)
    if target.exists():
        raise CheckpointError(f"{target} is already there; give a new folder")
    steps = saved_steps(path)
    if step in ("base", "all") or not steps:
        raise CheckpointError(f"{path} holds no checkpoint to export{'' if not steps else f' by the name {step}'}")
    config = run_config(path, ["device=cpu", "compile=false"])
    checkpoint = open_step(path, steps_of(path, step, steps)[0])
    source = checkpoint.path / "model"
    run = planned(config.model_copy(update={"model": str(source), "activations": "recompute", "save_strategy": "no"}))
    refuse_misfit(run.spec, run.config, run.machine, run.table)
    store = store_of(run)
    restore(store, checkpoint)
    readme = card(read_record(path), checkpoint.step, checkpoint.manifest, kind, chosen).encode()
    documents = {"README.md": readme}
    if kind == "hf":
        write_hf_folder(
            target,
            store,
            run.spec,
            run.hf_config,
            source,
            dtype=DTYPES[chosen],
            shard_bytes=shard_bytes,
            documents=documents,
        )
    else:
        applied_steps = checkpoint.trainer_state["applied_steps"]
        write_dcp_folder(target, store, run.spec, run.hf_config, source, _hyper(config), applied_steps, documents)
    store.close()
    print(f"step {checkpoint.step} of {path} as {chosen}{' with AdamW state' if kind == 'dcp' else ''}: {target}")
    return 0


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

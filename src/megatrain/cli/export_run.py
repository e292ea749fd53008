"""`megatrain export`: a checkpoint as a Hugging Face folder, or as a torch.distributed.checkpoint to go on from."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatrain.checkpoint import (
    Checkpoint,
    has_average,
    open_step,
    restore,
    take_averages,
    write_dcp_folder,
    write_hf_folder,
)
from megatrain.cli.assemble import Planned, planned, store_of
from megatrain.cli.exported import Export
from megatrain.cli.pointed import on_cpu
from megatrain.cli.shortage import explained_shortage
from megatrain.config import RunConfig
from megatrain.config_run import run_config
from megatrain.errors import CheckpointError
from megatrain.optim import AdamW
from megatrain.planner import refuse_misfit
from megatrain.report import card, read_record

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ANY_DECAY = 0.5  # an export makes room for an average and updates none


def export(asked: Export) -> int:
    """Write the checkpoint that `asked` names, as it says."""
    path = asked.path
    checkpoint = open_step(path, asked.step)
    if asked.ema and not has_average(checkpoint):
        raise CheckpointError(
            f"step {checkpoint.step} of {path} has no average of the weights: it was trained without ema_decay; leave "
            "--ema out"
        )
    changes = {"activations": "recompute", "save_strategy": "no", "ema_decay": ANY_DECAY if asked.ema else None}
    config = on_cpu(run_config(path)).model_copy(update=changes)
    run = planned(config, checkpoint.path / "model")
    refuse_misfit(run.question, run.plan)
    said = f"{asked.dtype}, the running average (ema_decay)" if asked.ema else asked.dtype
    readme = card(read_record(path), checkpoint.step, checkpoint.manifest, asked.kind, said).encode()
    with explained_shortage(run):
        _write(run, checkpoint, asked, {"README.md": readme})
    state = " with AdamW state" if asked.kind == "dcp" else ""
    print(f"step {checkpoint.step} of {path} as {said}{state}: {asked.target}")
    return 0


def _write(run: Planned, checkpoint: Checkpoint, asked: Export, documents: Mapping[str, bytes]) -> None:
    store = store_of(run)
    restore(store, checkpoint)
    if "ema" in store.state_kinds:
        take_averages(store)
    parts = (asked.target, store, run.spec, run.hf_config, run.source)
    if asked.kind == "hf":
        write_hf_folder(*parts, dtype=DTYPES[asked.dtype], shard_bytes=asked.shard_bytes, documents=documents)
    else:
        write_dcp_folder(*parts, _hyper(run.config), checkpoint.trainer_state["applied_steps"], documents)
    store.close()


def _hyper(config: RunConfig) -> AdamW:
    """The settings of AdamW with the peak learning rate."""
    return AdamW(
        learning_rate=config.learning_rate,
        beta1=config.adam_beta1,
        beta2=config.adam_beta2,
        epsilon=config.adam_epsilon,
        weight_decay=config.weight_decay,
    )

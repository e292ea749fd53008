"""A run as a torch.distributed.checkpoint folder: model and AdamW state under the names of `get_state_dict`.

    model.NAME                                fp32 masters
    optim.state.NAME.step | exp_avg | exp_avg_sq
    optim.param_groups.I.KEY                  as get_state_dict gives them
    optim.param_groups.NAME.KEY               as with flatten_optimizer_state_dict=True (torchtitan)
NAME is the parameter's name in the Hugging Face model. FSDP2 reshards while loading; no converter is needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PretrainedConfig

from megatrain.checkpoint.export import read_companions, write_bytes, write_companions
from megatrain.checkpoint.fs import BLOCK_BYTES, Files, remove_tree
from megatrain.checkpoint.load_hf import TIED_HEAD, read_buffers
from megatrain.errors import CheckpointError
from megatrain.models.layout import Entry
from megatrain.models.spec import ModelSpec
from megatrain.optim import AdamW
from megatrain.planner.sizes import SLACK_DISK_BYTES
from megatrain.store import SegmentStore

_STEP_ELEMENTS = BLOCK_BYTES // 4


def write_dcp_folder(
    path: Path,
    store: SegmentStore,
    spec: ModelSpec,
    config: PretrainedConfig,
    tokenizer_source: Path | None,
    hyper: AdamW,
    applied_steps: int,
    documents: Mapping[str, bytes],
) -> None:
    """Writes a new folder `path`: whole or not there at all. Config and tokenizer lie beside, to build the model from.

    `tokenizer_source` also has the buffers that a checkpoint holds and nothing trains. The store's gradient homes are
    used as scratch: masters of precision bf16 are joined there. `documents`: more files.
    """
    files = Files()
    if path.exists():
        raise CheckpointError(f"{path} is already there; give a new folder")
    if not files.is_folder(path.parent):
        raise CheckpointError(f"{path} cannot be made: {path.parent} is no folder; make it first")
    state = dcp_state(store, spec, hyper, applied_steps)
    if tokenizer_source is not None:
        state["model"] |= {name: value for name, (_, value) in read_buffers(tokenizer_source, spec, files).items()}
    needed_bytes = _num_bytes(state) + SLACK_DISK_BYTES
    free_bytes = files.free_bytes(path.parent)
    if needed_bytes > free_bytes:
        raise CheckpointError(f"{path}: {needed_bytes:,} bytes are needed, {free_bytes:,} are free; free disk space")
    temporary = path.parent / f"{path.name}.tmp-{uuid.uuid4().hex}"
    try:
        with ExitStack() as undo:
            undo.callback(remove_tree, files, temporary)
            files.make_folder(temporary)
            with catch_warnings():
                filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
                save(state, storage_writer=FileSystemWriter(temporary), no_dist=True)
            write_companions(files, temporary, config, read_companions(tokenizer_source, files), torch.float32)
            for name, data in documents.items():
                write_bytes(files, temporary / name, data)
            files.sync_folder(temporary)
            files.rename(temporary, path)
        files.sync_folder(path.parent)
    except OSError as failure:
        raise CheckpointError(f"{path} could not be written: {failure}") from failure


def dcp_state(store: SegmentStore, spec: ModelSpec, hyper: AdamW, applied_steps: int) -> dict[str, Any]:
    """The state dict that is saved: views of the store, and masters in its gradient homes."""
    away = [segment.name for segment in spec.segments if store.on_disk(segment.name)]
    if away:
        raise CheckpointError(
            f"a torch.distributed.checkpoint is written from memory, but {away[0]} and {len(away) - 1} more live on "
            "disk; raise memory.ram, or export as hf"
        )
    model: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Tensor]] = {}
    for segment in spec.segments:
        for entry in store.layouts[segment.name].entries:
            tensor = entry.tensor
            model[tensor.name] = _master(store, segment.name, entry).view(tensor.shape)
            if tensor.trainable:
                moments[tensor.name] = {
                    "step": torch.tensor(float(applied_steps)),
                    "exp_avg": store.flat(segment.name, "m")[entry.offset : entry.stop].view(tensor.shape),
                    "exp_avg_sq": store.flat(segment.name, "v")[entry.offset : entry.stop].view(tensor.shape),
                }
    if spec.tied:
        table = next(t for t in spec.segments[0].tensors if t.shape == (spec.vocab_size, spec.hidden_size))
        model[TIED_HEAD] = model[table.name]
    groups = param_groups(spec, hyper)
    by_name = {
        f"param_groups.{name}.{key}": value
        for group in groups
        for name in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {"model": model, "optim": {"state": moments, "param_groups": groups, **by_name}}


def param_groups(spec: ModelSpec, hyper: AdamW) -> list[dict[str, Any]]:
    """As torch.optim.AdamW has them: one group, or with weight decay one that decays and one that does not."""
    trained = [tensor for segment in spec.segments for tensor in segment.tensors if tensor.trainable]
    if hyper.weight_decay == 0:
        parts = [([tensor.name for tensor in trained], 0.0)]
    else:
        parts = [
            ([tensor.name for tensor in trained if tensor.decay is decay], hyper.weight_decay if decay else 0.0)
            for decay in (True, False)
        ]
    return [{**_defaults(hyper, weight_decay), "params": names} for names, weight_decay in parts if names]


def _defaults(hyper: AdamW, weight_decay: float) -> dict[str, Any]:
    """Every key of a group, as this version of torch has them; initial_lr is what a scheduler looks for."""
    optimizer = torch.optim.AdamW(
        [torch.zeros(1)],
        lr=hyper.learning_rate,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.epsilon,
        weight_decay=weight_decay,
    )
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return group | {"initial_lr": hyper.learning_rate}


def _master(store: SegmentStore, segment: str, entry: Entry) -> Tensor:
    """One tensor's fp32 master, 1-D: the store's own where it is the weight, else joined in the gradient's home."""
    if store.precision == "fp32":
        return store.flat(segment, "w")[entry.offset : entry.stop]
    if not entry.tensor.trainable or "grad" not in store.kinds(segment):
        return store.master(segment, entry)
    home = store.flat(segment, "grad")[entry.offset : entry.stop]
    for start in range(0, home.numel(), _STEP_ELEMENTS):
        stop = min(start + _STEP_ELEMENTS, home.numel())
        home[start:stop].copy_(store.master(segment, entry, start, stop))
    return home


def _num_bytes(state: Mapping[str, Any]) -> int:
    """Bytes of the tensors, as they are written: a tied head twice."""
    weights = sum(tensor.nbytes for tensor in state["model"].values())
    return weights + sum(tensor.nbytes for kinds in state["optim"]["state"].values() for tensor in kinds.values())

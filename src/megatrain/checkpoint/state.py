"""Training checkpoints: the segment store as files, segment by segment, and back, bit for bit.

step-N/model/  a Hugging Face folder at compute precision, one shard a segment: kind w
step-N/state/  SEGMENT.safetensors with "lo.NAME", "m.NAME", "v.NAME", and "ema.NAME" if an average is kept, of each
               trainable tensor; trainer.json
Stored by tensor, not by buffer: a checkpoint fits any placement and any layout of the same model.
"""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PretrainedConfig

import megatrain
from megatrain.checkpoint.average import KIND, has_average, start_averages
from megatrain.checkpoint.commit import TRAINER, Checkpoint, Commit, check_keep
from megatrain.checkpoint.experts import published
from megatrain.checkpoint.export import (
    flat_pieces,
    model_tensors,
    read_companions,
    saved_buffers,
    shard_names,
    write_bytes,
    write_companions,
    write_index,
    write_tensors,
)
from megatrain.checkpoint.fs import BLOCK_BYTES, Files, cannot_read
from megatrain.checkpoint.load_hf import INDEX, tensor_names
from megatrain.checkpoint.safetensors_file import DTYPES, TensorInfo, WriteTensor, read_header, read_into
from megatrain.errors import CheckpointError
from megatrain.models.spec import ModelSpec
from megatrain.store import SegmentStore

# Buffers that training never changes, as the base model's folder has them; the template reads them from there.
BUFFERS = "model-buffers.safetensors"


class _Home(NamedTuple):
    """Where a tensor of the files belongs: a part of a home buffer. `shape` is the one it has in the files."""

    segment: str
    kind: str
    part: slice
    shape: tuple[int, ...]


class CheckpointWriter:
    """Saves one run's store. Per step: begin, write_segment for every segment in any order, then commit or abort.

    `run_facts` (JSON) go into every manifest: config hash, data fingerprint. `keep` is save_total_limit.
    """

    def __init__(
        self,
        run_dir: Path,
        store: SegmentStore,
        spec: ModelSpec,
        config: PretrainedConfig,
        tokenizer_source: Path | None,
        *,
        keep: int,
        run_facts: Mapping[str, Any],
        files: Files | None = None,
    ) -> None:
        check_keep(keep)
        self._run_dir, self._store, self._config = run_dir, store, config
        self._keep, self._run_facts, self._files = keep, run_facts, files or Files()
        self._names = () if tokenizer_source is None else tensor_names(tokenizer_source, self._files)
        with_weights = [segment.name for segment in spec.segments if segment.tensors]
        self._shards = dict(zip(with_weights, shard_names(len(with_weights)), strict=True))
        self._buffers = saved_buffers(tokenizer_source, spec, self._files)
        self._companions = read_companions(tokenizer_source, self._files)
        self._commit: Commit | None = None
        self._missing: set[str] = set()

    def begin(self, step: int) -> None:
        """Opens the checkpoint of `step`; refuses what is known to fail (disk space, a saved step) before writing."""
        assert self._commit is None, "one checkpoint at a time"
        self._commit = Commit(self._run_dir, step, checkpoint_bytes(self._store), self._keep, self._files)
        self._missing = set(self._shards)
        folder = self._commit.folder / "model"
        dtype = self._store.dtype("w")
        records = write_companions(self._files, folder, self._config, self._companions, dtype)
        if self._buffers:
            records[BUFFERS] = write_tensors(self._files, folder / BUFFERS, self._buffers)
        if len(self._shards) > 1:
            shards = {shard: self._model_tensors(segment) for segment, shard in self._shards.items()}
            shards |= {BUFFERS: self._buffers} if self._buffers else {}
            records[INDEX] = write_index(self._files, folder, shards)
        for name, record in records.items():
            self._commit.add(f"model/{name}", record)

    def write_segment(self, segment: str) -> None:
        """Writes one segment from its home buffers, which nothing may change meanwhile; durable on return."""
        assert self._commit is not None, "begin first"
        if segment not in self._shards:
            return
        self._missing.remove(segment)
        with self._store.visit(segment):
            parts = {f"model/{self._shards[segment]}": self._model_tensors(segment)}
            state = self._state_tensors(segment)
            if state:
                parts[f"state/{segment}.safetensors"] = state
            for name, tensors in parts.items():
                self._commit.add(name, write_tensors(self._files, self._commit.folder / name, tensors))

    def commit(self, trainer_state: Mapping[str, Any]) -> Path:
        """Makes it permanent, only then returns its folder. `trainer_state` is JSON; "step" in it must be the step;
        "best_step", if it is there, is what BEST will name and pruning will spare."""
        assert self._commit is not None, "begin first"
        assert not self._missing, f"segments not written: {sorted(self._missing)}"
        if trainer_state["step"] != self._commit.step:
            raise ValueError(f"trainer_state is of step {trainer_state['step']}, the checkpoint of {self._commit.step}")
        data = json.dumps(trainer_state, indent=1, sort_keys=True, allow_nan=False).encode()
        self._commit.add(TRAINER, write_bytes(self._files, self._commit.folder / TRAINER, data))
        store = self._store
        facts = {"precision": store.precision, "state_kinds": list(store.state_kinds), "versions": _versions()}
        facts["run"] = dict(self._run_facts)
        path = self._commit.commit(facts, trainer_state.get("best_step"))
        self._commit = None
        return path

    def abort(self) -> None:
        """Removes an unfinished checkpoint; without one, does nothing."""
        commit, self._commit = self._commit, None
        if commit is not None:
            commit.abort()

    def _model_tensors(self, segment: str) -> list[WriteTensor]:
        return model_tensors(self._store, segment, self._store.dtype("w"), self._names)

    def _state_tensors(self, segment: str) -> list[WriteTensor]:
        tensors = []
        for kind in _state_kinds(self._store, segment):
            flat = self._store.flat(segment, kind)
            for entry in self._store.layouts[segment].entries:
                if entry.tensor.trainable:
                    pieces = flat_pieces(flat[entry.offset : entry.stop])
                    tensors.append(WriteTensor(f"{kind}.{entry.tensor.name}", flat.dtype, entry.tensor.shape, pieces))
        return tensors


def save_checkpoint(
    writer: CheckpointWriter,
    step: int,
    write_parts: Callable[[Callable[[str], None]], None],
    trainer_state: Mapping[str, Any],
) -> Path:
    """Saves `step`, or leaves nothing behind. `write_parts` calls back with each segment's name (Engine.save does)."""
    try:
        with ExitStack() as undo:
            undo.callback(writer.abort)
            writer.begin(step)
            write_parts(writer.write_segment)
            path = writer.commit(trainer_state)
    except OSError as failure:
        raise CheckpointError(
            f"step {step} could not be saved: {failure}; free disk space or mend the disk, then resume"
        ) from failure
    return path


def checkpoint_bytes(store: SegmentStore) -> int:
    """Bytes of tensors in one checkpoint of this store."""
    total_bytes = 0
    for segment, layout in store.layouts.items():
        for entry in layout.entries:
            kinds = ("w", *_state_kinds(store, segment)) if entry.tensor.trainable else ("w",)
            total_bytes += sum(entry.tensor.num_elements * store.dtype(kind).itemsize for kind in kinds)
    return total_bytes


def restore(store: SegmentStore, checkpoint: Checkpoint, files: Files | None = None) -> None:
    """Fills w and state of every segment with the saved bits; CheckpointError if of another model or precision.

    An average that was not saved starts at the restored masters; one that `store` does not keep is passed over.
    """
    files = files or Files()
    saved = checkpoint.manifest["precision"]
    if saved != store.precision:
        raise CheckpointError(
            f"{checkpoint.path} was saved with precision {saved}, not {store.precision}; set precision: {saved}"
        )
    try:
        names = tensor_names(checkpoint.path / "model", files)
    except OSError as failure:
        raise CheckpointError(cannot_read(checkpoint.path / "model", failure)) from failure
    keeps_average = KIND in store.state_kinds
    unsaved = (KIND,) if keeps_average and not has_average(checkpoint) else ()
    passed_over = () if keeps_average else (f"{KIND}.",)
    homes = {"model": _model_homes(store, names), "state": _state_homes(store, unsaved)}
    staging = bytearray(BLOCK_BYTES)
    for name in checkpoint.manifest["files"]:
        if name.endswith(".safetensors") and name != f"model/{BUFFERS}":
            folder = name.split("/")[0]
            ignored = passed_over if folder == "state" else ()
            _restore_file(files, checkpoint.path / name, store, homes[folder], staging, ignored)
    missing = sorted([*homes["model"], *homes["state"]])
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} has no tensor {missing[0]}; the model or `freeze` changed since it was saved"
        )
    if unsaved:
        start_averages(store)


def _model_homes(store: SegmentStore, names: Collection[str]) -> dict[str, _Home]:
    """Homes of the weights, for a model folder with tensors `names`."""
    homes = {}
    for segment, layout in store.layouts.items():
        for entry in layout.entries:
            for part in published(entry.tensor, names):
                first = entry.offset + part.start
                homes[part.name] = _Home(segment, "w", slice(first, first + part.num_elements), part.shape)
    return homes


def _state_homes(store: SegmentStore, unsaved: Collection[str]) -> dict[str, _Home]:
    """Homes of the state, but for kinds that are not in the files."""
    homes = {}
    for segment, layout in store.layouts.items():
        for kind in [kind for kind in _state_kinds(store, segment) if kind not in unsaved]:
            for entry in layout.entries:
                if entry.tensor.trainable:
                    home = _Home(segment, kind, slice(entry.offset, entry.stop), entry.tensor.shape)
                    homes[f"{kind}.{entry.tensor.name}"] = home
    return homes


def _restore_file(
    files: Files,
    path: Path,
    store: SegmentStore,
    homes: dict[str, _Home],
    staging: bytearray,
    passed_over: tuple[str, ...],
) -> None:
    """Reads each tensor of one file into its home and strikes it off `homes`. `passed_over`: beginnings of names."""
    try:
        fd = files.open(path)
        try:
            found: dict[str, list[tuple[TensorInfo, _Home]]] = defaultdict(list)
            for name, info in read_header(files, fd, path).items():
                if name.startswith(passed_over):
                    continue
                if name not in homes:
                    raise CheckpointError(
                        f"{path}: tensor {name} is no part of this run; the model or `freeze` changed"
                    )
                home = homes.pop(name)
                _check_same(path, info, store.dtype(home.kind), home.shape)
                found[home.segment].append((info, home))
            for segment, tensors in found.items():
                with store.visit(segment, *{home.kind for _, home in tensors}, write=True):
                    for info, home in tensors:
                        read_into(files, fd, path, info, store.flat(segment, home.kind)[home.part], staging)
        finally:
            files.close(fd)
    except OSError as failure:
        raise CheckpointError(cannot_read(path, failure)) from failure


def _check_same(path: Path, info: TensorInfo, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if info.shape != shape or DTYPES.get(info.dtype) != dtype:
        raise CheckpointError(
            f"{path}: tensor {info.name} is {info.dtype} of shape {info.shape}, this run needs {dtype} of {shape}"
        )


def _state_kinds(store: SegmentStore, segment: str) -> list[str]:
    return [kind for kind in store.state_kinds if kind in store.kinds(segment)]


def _versions() -> dict[str, str]:
    return {
        "megatrain": megatrain.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }

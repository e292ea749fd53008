"""Hugging Face folders from the segment store: config, tokenizer, safetensors; transformers opens them unchanged."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from megatrain.checkpoint.experts import Part, published
from megatrain.checkpoint.fs import (
    BLOCK_BYTES,
    Data,
    FileRecord,
    Files,
    read_small,
    remove_tree,
    write_hashed,
)
from megatrain.checkpoint.load_hf import INDEX, SINGLE, read_buffers, tensor_names
from megatrain.checkpoint.safetensors_file import WriteTensor, encode_header, file_pieces, num_bytes_of_file
from megatrain.errors import CheckpointError, ModelError
from megatrain.models.layout import Entry
from megatrain.models.spec import ModelSpec
from megatrain.planner.sizes import SLACK_DISK_BYTES
from megatrain.store import SegmentStore, split_master

SHARD_BYTES = 5_000_000_000
# Copied as they are from the source folder when there: everything a tokenizer or a generation loop reads.
COMPANIONS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
TEMPLATES = "additional_chat_templates"
_MAX_COMPANION_BYTES = 256 << 20
_HF_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def write_hf_folder(
    path: Path,
    store: SegmentStore,
    spec: ModelSpec,
    config: PretrainedConfig,
    tokenizer_source: Path | None,
    *,
    shard_bytes: int = SHARD_BYTES,
    dtype: torch.dtype,
    documents: Mapping[str, bytes] | None = None,
    files: Files | None = None,
) -> None:
    """Writes a new folder `path` that transformers opens unchanged: whole and durable, or not there at all.

    dtype float32: the exact masters; bfloat16: the compute weights; float16: the nearest, refused where one overflows.
    A tied embedding is written once. Experts are named and split as in the weights of `tokenizer_source`, the base
    model's folder, if it has any. `documents`: more files, by name (a model card).
    """
    files = files or Files()
    if path.exists():
        raise CheckpointError(f"{path} is already there; give a new folder")
    if not path.parent.is_dir():
        raise CheckpointError(f"{path} cannot be made: {path.parent} is no folder; make it first")
    temporary = path.parent / f"{path.name}.tmp-{uuid.uuid4().hex}"
    names = () if tokenizer_source is None else tensor_names(tokenizer_source, files)
    tensors = [tensor for segment in spec.segments for tensor in model_tensors(store, segment.name, dtype, names)]
    tensors += saved_buffers(tokenizer_source, spec, files)
    shards = _shards(tensors, shard_bytes)
    needed_bytes = sum(tensor.num_bytes for tensor in tensors) + SLACK_DISK_BYTES
    free_bytes = files.free_bytes(path.parent)
    if needed_bytes > free_bytes:
        raise CheckpointError(f"{path}: {needed_bytes:,} bytes are needed, {free_bytes:,} are free; free disk space")
    by_name = dict(zip(shard_names(len(shards)), shards, strict=True))
    try:
        with ExitStack() as undo:
            undo.callback(remove_tree, files, temporary)
            files.make_folder(temporary)
            write_companions(files, temporary, config, read_companions(tokenizer_source, files), dtype)
            for name, data in (documents or {}).items():
                write_bytes(files, temporary / name, data)
            for name, shard in by_name.items():
                write_tensors(files, temporary / name, shard)
            if len(shards) > 1:
                write_index(files, temporary, by_name)
            files.sync_folder(temporary)
            files.rename(temporary, path)
        files.sync_folder(path.parent)
    except OSError as failure:
        raise CheckpointError(f"{path} could not be written: {failure}") from failure


def model_tensors(store: SegmentStore, segment: str, dtype: torch.dtype, names: Collection[str]) -> list[WriteTensor]:
    """A segment as it goes into a model folder named like `names`; pieces are read from the store when written."""
    return [
        WriteTensor(part.name, dtype, part.shape, _model_pieces(store, segment, entry, part, dtype))
        for entry in store.layouts[segment].entries
        for part in published(entry.tensor, names)
    ]


def saved_buffers(source: Path | None, spec: ModelSpec, files: Files) -> list[WriteTensor]:
    """The buffers that the base model's folder holds, as they are there: nothing trains them."""
    found = {} if source is None else read_buffers(source, spec, files)
    return [WriteTensor(name, value.dtype, value.shape, [value.flatten()]) for name, value in found.values()]


def _model_pieces(store: SegmentStore, segment: str, entry: Entry, part: Part, dtype: torch.dtype) -> Iterator[Tensor]:
    """A part of a tensor of the store in `dtype`, in pieces; RAM homes of that dtype are not copied."""
    if store.dtype("w") == dtype:
        first = entry.offset + part.start
        with store.visit(segment, "w"):
            yield from flat_pieces(store.flat(segment, "w")[first : first + part.num_elements])
        return
    step, end = BLOCK_BYTES // 4, part.start + part.num_elements
    with store.visit(segment, "w", "lo"):
        for start in range(part.start, end, step):
            master = store.master(segment, entry, start, min(start + step, end))
            yield _rounded(master, dtype, part.name)


def _rounded(master: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """fp32 masters in `dtype`. Finite values stay finite in bfloat16; in float16 they may not, which is refused."""
    if dtype == torch.float32:
        return master
    if dtype == torch.bfloat16:
        return split_master(master)[0]
    half = master.to(torch.float16)
    lost = half.isinf() & master.isfinite()
    if lost.any():
        worst = master[lost].abs().max().item()
        raise ModelError(
            f"tensor {name} holds {worst:.6g}, beyond the {torch.finfo(torch.float16).max:g} of fp16; export as bf16 "
            "or fp32"
        )
    return half


def flat_pieces(flat: Tensor) -> Iterator[Tensor]:
    """A 1-D tensor in pieces of BLOCK_BYTES in RAM; those already there are views."""
    step = BLOCK_BYTES // flat.itemsize
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu()


def shard_names(num_shards: int) -> list[str]:
    """File names of the shards as transformers spells them."""
    if num_shards == 1:
        return [SINGLE]
    return [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]


def write_tensors(files: Files, path: Path, tensors: Sequence[WriteTensor]) -> FileRecord:
    """Creates one safetensors file, its data durable on return."""
    header = encode_header(tensors, {"format": "pt"})
    return write_hashed(files, path, file_pieces(header, tensors), num_bytes_of_file(header, tensors))


def write_index(files: Files, folder: Path, shards: Mapping[str, Sequence[WriteTensor]]) -> FileRecord:
    """Creates the index of a sharded model."""
    total_bytes = sum(tensor.num_bytes for shard in shards.values() for tensor in shard)
    weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
    return write_json(files, folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def read_companions(source: Path | None, files: Files) -> dict[str, bytes]:
    """The tokenizer's and generation files of a model folder, by their names in it; none without a folder.

    Read once and kept (tens of MB at most), so that a run can save after its base model's folder is gone.
    """
    if source is None:
        return {}
    present = files.names(source)
    names = [name for name in COMPANIONS if name in present]
    if TEMPLATES in present:
        names += [f"{TEMPLATES}/{name}" for name in files.names(source / TEMPLATES)]
    return {name: read_small(files, source / name, _MAX_COMPANION_BYTES, ModelError) for name in names}


def write_companions(
    files: Files, folder: Path, config: PretrainedConfig, companions: Mapping[str, bytes], dtype: torch.dtype
) -> dict[str, FileRecord]:
    """Creates config.json, and the files of `read_companions` as they were; name -> record."""
    members = json.loads(config.to_json_string())
    members.pop("torch_dtype", None)
    members["dtype"] = _HF_NAMES[dtype]
    records = {"config.json": write_json(files, folder / "config.json", members)}
    inside = any(name.startswith(f"{TEMPLATES}/") for name in companions)
    if inside:
        files.make_folder(folder / TEMPLATES)
    for name, data in companions.items():
        records[name] = write_bytes(files, folder / name, data)
    if inside:
        files.sync_folder(folder / TEMPLATES)
    return records


def write_json(files: Files, path: Path, members: Mapping[str, object]) -> FileRecord:
    """Creates a JSON file."""
    return write_bytes(files, path, (json.dumps(members, indent=2, sort_keys=True) + "\n").encode())


def write_bytes(files: Files, path: Path, data: bytes) -> FileRecord:
    """Creates a file with `data`."""
    pieces: Iterator[Data] = (data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))
    return write_hashed(files, path, pieces, len(data))


def _shards(tensors: Sequence[WriteTensor], shard_bytes: int) -> list[list[WriteTensor]]:
    """Tensors in order, cut so that no shard exceeds `shard_bytes` unless one tensor alone does."""
    shards: list[list[WriteTensor]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        if shards[-1] and size_bytes + tensor.num_bytes > shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(tensor)
        size_bytes += tensor.num_bytes
    return shards

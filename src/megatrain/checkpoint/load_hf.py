"""Loads the weights of a Hugging Face folder straight into the segment store, one piece of one tensor at a time.

Host memory beyond the store stays under 100 MiB whatever the model's size, and the page cache is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.checkpoint.experts import Part, published
from megatrain.checkpoint.fs import BLOCK_BYTES, Files, cannot_read, read_small
from megatrain.checkpoint.safetensors_file import DTYPES, TensorInfo, read_header, read_into, read_pieces
from megatrain.errors import ModelError
from megatrain.memory import drop_page_cache
from megatrain.models.layout import Entry
from megatrain.models.spec import ModelSpec, TensorSpec
from megatrain.store import SegmentStore
from megatrain.strict_json import strict_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TIED_HEAD = "lm_head.weight"
# Masters are made from so many elements at once: the temporaries of the split stay in cache.
CHUNK_ELEMENTS = 1 << 20
_MAX_INDEX_BYTES = 100_000_000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Rotary tables that old checkpoints carry; they are computed, never trained.
_COMPUTED = (".rotary_emb.inv_freq",)


@dataclass(frozen=True)
class _Stored:
    """A tensor of the folder: the open file it is in and its header entry."""

    path: Path
    fd: int
    info: TensorInfo


def load_weights(folder: Path, store: SegmentStore, spec: ModelSpec, files: Files | None = None) -> None:
    """Fills w (lo, ema) of every segment with the masters in `folder`; m, v and grad are not touched.

    bf16, fp16 and fp32 files; one model.safetensors, or shards and an index. The names and shapes must be the model's
    exactly (lm_head.weight may be absent, or equal to the embedding, where they are tied). ModelError names the tensor
    and file that do not fit, before any weight is written wherever the headers show it. A NaN or Inf is refused: every
    loss would be one, and no step would apply.
    """
    files = files or Files()
    with ExitStack() as closing:
        stored, parts = _fitting(folder, spec, files, closing)
        if spec.tied and TIED_HEAD in stored:
            _check_tied(files, stored, spec)
        staging = bytearray(BLOCK_BYTES)
        for segment in spec.segments:
            with store.visit(segment.name, "w", "lo", "ema", write=True):
                for tensor in segment.tensors:
                    entry = store.layouts[segment.name][tensor.name]
                    for part in parts[tensor.name]:
                        _load_part(files, stored[part.name], store, segment.name, entry, part.start, staging)


def check_weights(folder: Path, spec: ModelSpec, files: Files | None = None) -> None:
    """ModelError where `load_weights` would find one in the headers; no weight is read."""
    with ExitStack() as closing:
        _fitting(folder, spec, files or Files(), closing)


def _fitting(
    folder: Path, spec: ModelSpec, files: Files, closing: ExitStack
) -> tuple[Mapping[str, _Stored], dict[str, list[Part]]]:
    """(the tensors of the folder, which of them make each tensor of the model); ModelError unless all belong."""
    stored = _open_all(folder, files, closing)
    wanted = [tensor for segment in spec.segments for tensor in segment.tensors]
    parts = {tensor.name: _parts_of(tensor, stored, folder) for tensor in wanted}
    used = {part.name for found in parts.values() for part in found} | set(_buffer_names(stored, spec).values())
    _check_rest(stored, used | ({TIED_HEAD} if spec.tied else set()))
    return stored, parts


def read_buffers(folder: Path, spec: ModelSpec, files: Files | None = None) -> dict[str, tuple[str, torch.Tensor]]:
    """The saved buffers of a folder, which training never changes: our name -> (its name there, the tensor as it is).

    What the folder does not have is left out: it is the model's own constant.
    """
    files = files or Files()
    names = files.names(folder)
    if not spec.saved_buffers or (SINGLE not in names and INDEX not in names):
        return {}
    found = {}
    staging = bytearray(BLOCK_BYTES)
    with ExitStack() as closing:
        stored = _open_all(folder, files, closing)
        shapes = {tensor.name: tensor.shape for tensor in spec.saved_buffers}
        for name, there in _buffer_names(stored, spec).items():
            _check_part(Part(there, shapes[name], 0), stored[there])
            info = stored[there].info
            value = torch.empty(info.num_elements, dtype=DTYPES[info.dtype])
            read_into(files, stored[there].fd, stored[there].path, info, value, staging)
            found[name] = (there, value.reshape(info.shape))
    return found


def _buffer_names(stored: Collection[str], spec: ModelSpec) -> dict[str, str]:
    """Our name -> its name among `stored`, of the saved buffers that are there."""
    return {
        tensor.name: name
        for tensor in spec.saved_buffers
        for name in (tensor.name, tensor.published)
        if name is not None and name in stored
    }


def tensor_names(folder: Path, files: Files) -> Collection[str]:
    """Names of the tensors in a folder's safetensors files; none where it has no such files."""
    names = files.names(folder)
    if SINGLE not in names and INDEX not in names:
        return ()
    with ExitStack() as closing:
        return tuple(_open_all(folder, files, closing))


def _load_part(
    files: Files, stored: _Stored, store: SegmentStore, segment: str, entry: Entry, start: int, staging: bytearray
) -> None:
    """One tensor of a file into elements from `start` on of one tensor of the store."""
    try:
        for first, piece in read_pieces(files, stored.fd, stored.path, stored.info, staging):
            for offset in range(0, piece.numel(), CHUNK_ELEMENTS):
                values = piece[offset : offset + CHUNK_ELEMENTS].to(torch.float32)
                _refuse_non_finite(values, stored, first + offset)
                store.set_master(segment, entry, values, start + first + offset)
    except OSError as failure:
        raise ModelError(f"tensor {stored.info.name}: {cannot_read(stored.path, failure)}") from failure
    drop_page_cache(stored.fd, stored.info.start_bytes, stored.info.stop_bytes - stored.info.start_bytes)


def _refuse_non_finite(values: torch.Tensor, stored: _Stored, first: int) -> None:
    """ModelError naming the tensor. One pass of 0.1 ms over 4 MiB in cache; both ends are NaN where a value is."""
    least, most = torch.aminmax(values)
    if math.isfinite(least.item()) and math.isfinite(most.item()):
        return
    bad = torch.isfinite(values).logical_not_()
    index = int(bad.nonzero()[0])
    raise ModelError(
        f"{stored.path}: tensor {stored.info.name} holds {values[index].item()} at element {first + index:,}; no step "
        "from such weights could be applied: fetch the file again, or take a copy of the model without NaN and Inf"
    )


def _open_all(folder: Path, files: Files, closing: ExitStack) -> Mapping[str, _Stored]:
    """Every tensor of the folder by name, with headers checked; the files stay open until `closing` closes."""
    stored: dict[str, _Stored] = {}
    weight_map = _weight_map(folder, files)
    shards = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
    for shard in shards:
        path = folder / shard
        try:
            fd = files.open(path)
            closing.callback(files.close, fd)
            header = read_header(files, fd, path)
        except OSError as failure:
            raise ModelError(cannot_read(path, failure)) from failure
        for name, info in header.items():
            if name in stored:
                raise ModelError(f"tensor {name} is in {stored[name].path} and in {path}; one of them must go")
            stored[name] = _Stored(path, fd, info)
    for name, shard in (weight_map or {}).items():
        if name not in stored or stored[name].path.name != shard:
            raise ModelError(f"{folder / INDEX}: tensor {name} is not in {shard}; fetch index and shards again")
    return stored


def _weight_map(folder: Path, files: Files) -> dict[str, str] | None:
    """Tensor name -> shard name from the index; None for a single file. ModelError if there is neither."""
    names = files.names(folder)
    if SINGLE in names:
        return None
    if INDEX not in names:
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            raise ModelError(
                f"{folder}: {pickles[0]} is a pickle, which can run code when read; convert the folder to safetensors "
                "(load it in transformers where you trust it, then save_pretrained)"
            )
        raise ModelError(f"{folder}: no {SINGLE} and no {INDEX}; give a folder with safetensors weights")
    index = strict_json(read_small(files, folder / INDEX, _MAX_INDEX_BYTES, ModelError), folder / INDEX, ModelError)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX}: no weight_map; fetch the index again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{folder / INDEX}: shard {shard!r} of {name} is no plain *.safetensors file name")
    return weight_map


def _parts_of(tensor: TensorSpec, stored: Mapping[str, _Stored], folder: Path) -> list[Part]:
    """The stored tensors that together are `tensor`, shapes and dtypes checked."""
    parts = published(tensor, stored)
    for part in parts:
        if part.name not in stored:
            raise ModelError(f"{folder}: tensor {tensor.name} is in none of its files; fetch the model again")
        _check_part(part, stored[part.name])
    return parts


def _check_part(part: Part, stored: _Stored) -> None:
    info = stored.info
    if info.shape != part.shape:
        raise ModelError(
            f"{stored.path}: tensor {info.name} has shape {info.shape}, the model's config asks for {part.shape}; "
            "config.json and weights are of different models"
        )
    if info.dtype not in ("BF16", "F16", "F32"):
        raise ModelError(
            f"{stored.path}: tensor {info.name} is {info.dtype}; full-precision training starts from BF16, F16 or F32 "
            "weights, use that version of the model"
        )


def _check_tied(files: Files, stored: Mapping[str, _Stored], spec: ModelSpec) -> None:
    """A stored head of a tied model must equal the embedding, bit for bit: otherwise it would be lost silently."""
    head = stored[TIED_HEAD]
    tables = [t for t in spec.segments[0].tensors if t.shape == head.info.shape and t.name in stored]
    if not tables:
        raise ModelError(f"{head.path}: {TIED_HEAD} has shape {head.info.shape}, no embedding has the same")
    table = stored[tables[0].name]
    same = head.info.dtype == table.info.dtype
    if same:
        _check_part(Part(TIED_HEAD, head.info.shape, 0), head)
        one, other = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)
        both = zip(
            read_pieces(files, head.fd, head.path, head.info, one),
            read_pieces(files, table.fd, table.path, table.info, other),
            strict=True,
        )
        try:
            same = all(torch.equal(h.view(torch.uint8), t.view(torch.uint8)) for (_, h), (_, t) in both)
        except OSError as failure:
            raise ModelError(cannot_read(head.path, failure)) from failure
    if not same:
        raise ModelError(
            f"{head.path}: {TIED_HEAD} differs from {table.info.name}, but the config ties them; "
            "set tie_word_embeddings to false in config.json, or remove the tensor"
        )


def _check_rest(stored: Mapping[str, _Stored], used: set[str]) -> None:
    rest = [name for name in sorted(stored) if name not in used and not name.endswith(_COMPUTED)]
    if rest:
        raise ModelError(
            f"{stored[rest[0]].path}: tensor {rest[0]} is no part of this model"
            + (f" (nor are {len(rest) - 1} others)" if len(rest) > 1 else "")
            + "; config.json and weights are of different models, or of a kind that is not supported"
        )

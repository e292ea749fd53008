"""The safetensors format, streamed: 8 bytes of header length, a JSON header, then the tensors without gaps.

Own reader and writer, because the library maps whole files (their pages count as resident memory) and builds whole
dictionaries; ours holds one piece of one tensor. Every header is checked before a byte of data is believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatrain.checkpoint.fs import BLOCK_BYTES, Files, read_exactly
from megatrain.errors import ModelError
from megatrain.strict_json import strict_json

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_NUM_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I16": torch.int16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: its dtype as the format spells it, and its bytes [start, stop) counted from the file's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start_bytes: int
    stop_bytes: int

    @property
    def num_elements(self) -> int:
        return _product(self.shape)


class WriteTensor:
    """A tensor to write: name, dtype, shape, and where its bytes come from, piece by piece."""

    def __init__(self, name: str, dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[Tensor]) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = tuple(shape)
        self.num_bytes = _product(self.shape) * dtype.itemsize
        self.pieces = pieces  # 1-D, contiguous, in RAM, of `dtype`, at most BLOCK_BYTES each


def read_header(files: Files, fd: int, path: Path) -> dict[str, TensorInfo]:
    """Every tensor of an open file. ModelError, naming file and tensor, if the header does not fit the file exactly."""
    file_bytes = files.size_bytes(fd)
    if file_bytes < 8:
        raise ModelError(f"{path}: {file_bytes} bytes long, too short for a safetensors file; fetch it again")
    length = bytearray(8)
    read_exactly(files, fd, length, 0, path)
    header_bytes = int.from_bytes(length, "little")
    if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise ModelError(
            f"{path}: claims a header of {header_bytes:,} bytes in a file of {file_bytes:,}; "
            "it is damaged, cut short or no safetensors file, fetch it again"
        )
    header = bytearray(header_bytes)
    read_exactly(files, fd, header, 8, path)
    return parse_header(bytes(header), file_bytes, path)


def parse_header(header: bytes, file_bytes: int, path: Path) -> dict[str, TensorInfo]:
    """The tensors that a header (without its length) describes, in the order of their bytes."""
    members = strict_json(header, path, ModelError)
    members.pop("__metadata__", None)
    data_start = 8 + len(header)
    tensors = [_tensor_info(name, member, data_start, path) for name, member in members.items()]
    tensors.sort(key=lambda tensor: (tensor.start_bytes, tensor.stop_bytes))
    expected_bytes = data_start
    for tensor in tensors:
        if tensor.start_bytes != expected_bytes:
            raise ModelError(
                f"{path}: tensor {tensor.name} starts at byte {tensor.start_bytes:,}, not where the one before it "
                f"ends ({expected_bytes:,}); the header is damaged, fetch the file again"
            )
        expected_bytes = tensor.stop_bytes
    if expected_bytes != file_bytes:
        last = tensors[-1].name if tensors else "the header"
        raise ModelError(
            f"{path}: {file_bytes:,} bytes long, but {last} ends at byte {expected_bytes:,}; "
            "the file is cut short or damaged, fetch it again"
        )
    return {tensor.name: tensor for tensor in tensors}


def _tensor_info(name: str, member: Any, data_start: int, path: Path) -> TensorInfo:
    """One header member, its types, sizes and offsets checked."""
    where = f"{path}: tensor {name}"
    if not isinstance(member, dict) or set(member) != {"dtype", "shape", "data_offsets"}:
        raise ModelError(f"{where}: its header entry needs dtype, shape and data_offsets; the header is damaged")
    dtype, shape, offsets = member["dtype"], member["shape"], member["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _NUM_BITS:
        raise ModelError(f"{where}: unknown dtype {dtype!r}; convert the file to bfloat16 or float32")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ModelError(f"{where}: shape {shape!r} or data_offsets {offsets!r} is no list of sizes")
    size_bytes, rest = divmod(_product(shape) * _NUM_BITS[dtype], 8)
    if rest or offsets[1] - offsets[0] != size_bytes:
        raise ModelError(
            f"{where}: {dtype} of shape {shape} takes {size_bytes:,} bytes, its data_offsets {offsets} disagree"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(found: object) -> bool:
    return isinstance(found, list) and all(type(size) is int and size >= 0 for size in found)


def _product(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def read_pieces(
    files: Files, fd: int, path: Path, info: TensorInfo, staging: bytearray
) -> Iterator[tuple[int, Tensor]]:
    """(first element, 1-D tensor) over the whole tensor in order; each is a view of `staging`, gone at the next."""
    dtype = DTYPES[info.dtype]
    step_bytes = len(staging) // dtype.itemsize * dtype.itemsize
    for start_bytes in range(info.start_bytes, info.stop_bytes, step_bytes):
        size_bytes = min(step_bytes, info.stop_bytes - start_bytes)
        read_exactly(files, fd, memoryview(staging)[:size_bytes], start_bytes, path)
        piece = torch.frombuffer(staging, dtype=dtype, count=size_bytes // dtype.itemsize)
        yield (start_bytes - info.start_bytes) // dtype.itemsize, piece


def read_into(files: Files, fd: int, path: Path, info: TensorInfo, destination: Tensor, staging: bytearray) -> None:
    """Reads the tensor's raw bits into `destination`, 1-D of the same dtype and size: in place in RAM, else staged."""
    assert destination.dtype == DTYPES[info.dtype]
    assert destination.numel() == info.num_elements
    if destination.device.type == "cpu":
        read_exactly(files, fd, destination.view(torch.uint8).numpy().data, info.start_bytes, path)
        return
    for start, piece in read_pieces(files, fd, path, info, staging):
        destination[start : start + piece.numel()].copy_(piece)


def encode_header(tensors: Sequence[WriteTensor], metadata: Mapping[str, str]) -> bytes:
    """Length and header for tensors that follow in this order, padded so that data starts at a multiple of 8."""
    members: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset_bytes = 0
    for tensor in tensors:
        stop_bytes = offset_bytes + tensor.num_bytes
        members[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset_bytes, stop_bytes],
        }
        offset_bytes = stop_bytes
    text = json.dumps(members, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_pieces(header: bytes, tensors: Sequence[WriteTensor]) -> Iterator[memoryview]:
    """The bytes of a whole file: the header, then every tensor's pieces; no piece holds bytes of two tensors."""
    for start in range(0, len(header), BLOCK_BYTES):
        yield memoryview(header)[start : start + BLOCK_BYTES]
    for tensor in tensors:
        for piece in tensor.pieces:
            assert piece.dtype == tensor.dtype
            yield piece.view(torch.uint8).numpy().data


def num_bytes_of_file(header: bytes, tensors: Sequence[WriteTensor]) -> int:
    """The size of the file that `file_pieces` gives."""
    return len(header) + sum(tensor.num_bytes for tensor in tensors)

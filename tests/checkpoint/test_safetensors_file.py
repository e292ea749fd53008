"""The safetensors reader and writer against the library, and against files that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatrain.checkpoint import safetensors_file
from megatrain.checkpoint.export import flat_pieces, write_tensors
from megatrain.checkpoint.fs import Files
from megatrain.checkpoint.safetensors_file import TensorInfo, WriteTensor, read_header, read_into, read_pieces
from megatrain.errors import ModelError

FILES = Files()


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(7, 5, generator=generator),
        "b": torch.randn(33, generator=generator).bfloat16(),
        'ü"\n': torch.randint(-(1 << 15), 1 << 15, (3, 1, 2), generator=generator).to(torch.int16),
        "scalar": torch.randn((), generator=generator),
        "half": torch.randn(9, generator=generator).half(),
    }


def _to_write(tensors: dict[str, torch.Tensor]) -> list[WriteTensor]:
    return [WriteTensor(name, t.dtype, t.shape, flat_pieces(t.flatten())) for name, t in tensors.items()]


def _header(path: Path) -> dict[str, TensorInfo]:
    fd = FILES.open(path)
    try:
        return read_header(FILES, fd, path)
    finally:
        FILES.close(fd)


def test_the_library_reads_what_we_write(tmp_path: Path):
    tensors = _tensors()
    record = write_tensors(FILES, tmp_path / "f.safetensors", _to_write(tensors))
    assert record.num_bytes == (tmp_path / "f.safetensors").stat().st_size
    found = load_file(tmp_path / "f.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "f.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("staging_bytes", [1 << 20, 8, 20])
def test_we_read_what_the_library_writes(tmp_path: Path, staging_bytes: int):
    tensors, path = _tensors(), tmp_path / "f.safetensors"
    save_file(tensors, path, {"format": "pt"})
    header, staging = _header(path), bytearray(staging_bytes)
    assert set(header) == set(tensors)
    fd = FILES.open(path)
    for name, tensor in tensors.items():
        staged = torch.empty(tensor.numel(), dtype=tensor.dtype)
        for start, piece in read_pieces(FILES, fd, path, header[name], staging):
            staged[start : start + piece.numel()] = piece
        direct = torch.empty(tensor.numel(), dtype=tensor.dtype)
        read_into(FILES, fd, path, header[name], direct, staging)
        assert header[name].shape == tuple(tensor.shape)
        assert torch.equal(staged, tensor.flatten())
        assert torch.equal(direct, tensor.flatten())
    FILES.close(fd)


def test_every_piece_is_a_block_and_none_holds_two_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 64)
    tensors = _to_write(_tensors())
    record = write_tensors(FILES, tmp_path / "f.safetensors", tensors)
    header = _header(tmp_path / "f.safetensors")
    edges = {0}
    for size_bytes, digest in record.blocks:
        assert len(digest) == 64
        edges.add(max(edges) + size_bytes)
    assert {info.start_bytes for info in header.values()} <= edges
    assert record.blocks[0][0] == 64  # the header, in pieces of 64


def _good() -> dict[str, Any]:
    return {
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    }


def _write(path: Path, header: bytes, data_bytes: int = 24) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data_bytes))
    return path


def test_a_good_header_is_read(tmp_path: Path):
    header = _header(_write(tmp_path / "f", json.dumps(_good()).encode()))
    assert [(t.name, t.num_elements, t.stop_bytes - t.start_bytes) for t in header.values()] == [
        ("a", 4, 16),
        ("b", 4, 8),
    ]


def _set(name: str, key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("a", "dtype", "F16"), "tensor a: F16 of shape .* takes 8 bytes"),
        (_set("a", "dtype", "F33"), "tensor a: unknown dtype 'F33'"),
        (_set("a", "dtype", ["F32"]), "tensor a: unknown dtype"),
        (_set("a", "shape", [2, 3]), "takes 24 bytes"),
        (_set("a", "shape", [-2, -2]), "no list of sizes"),
        (_set("a", "shape", [2.0, 2]), "no list of sizes"),
        (_set("a", "shape", [True, 4]), "no list of sizes"),
        (_set("a", "shape", 4), "no list of sizes"),
        (_set("a", "shape", [1 << 62, 1 << 62]), "takes"),
        (_set("a", "data_offsets", [0, 16, 24]), "no list of sizes"),
        (_set("a", "data_offsets", [16, 0]), "disagree"),
        (_set("b", "data_offsets", [12, 20]), "tensor b starts at byte .*, not where the one before it ends"),
        (_set("b", "data_offsets", [17, 25]), "tensor b starts at byte"),
        (lambda header: header["a"].pop("dtype"), "tensor a: its header entry needs"),
        (lambda header: header["a"].update(extra=1), "tensor a: its header entry needs"),
        (lambda header: header.update(a=[]), "tensor a: its header entry needs"),
        (lambda header: header.pop("b"), "but a ends at byte"),
        (lambda header: header.clear(), "but the header ends at byte"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
):
    header = _good()
    change(header)
    with pytest.raises(ModelError, match=message) as caught:
        _header(_write(tmp_path / "f", json.dumps(header).encode()))
    assert str(tmp_path / "f") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[]", "a JSON object is expected"),
        (b'{"a": ', "not valid JSON"),
        (b'{"a": 1, "a": 1}', "key 'a' appears twice"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_text_that_is_no_header_is_refused(tmp_path: Path, text: bytes, message: str):
    with pytest.raises(ModelError, match=message):
        _header(_write(tmp_path / "f", text))


def test_truncated_and_oversized_files_are_refused(tmp_path: Path):
    header = json.dumps(_good()).encode()
    for data_bytes in (23, 25):
        with pytest.raises(ModelError, match="b ends at byte"):
            _header(_write(tmp_path / f"{data_bytes}", header, data_bytes))
    (tmp_path / "short").write_bytes(b"1234567")
    with pytest.raises(ModelError, match="7 bytes long, too short"):
        _header(tmp_path / "short")
    for size in (1 << 63, 100, 100_000_001):
        (tmp_path / "huge").write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(ModelError, match="claims a header of"):
            _header(tmp_path / "huge")

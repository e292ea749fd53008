"""The token file: every sample's ids and trained flags in memory-mapped flat files, written once, atomically.

    tokens.bin    uint16 or uint32, all samples one after another
    trained.bin   one bit a token (bit t & 7 of byte t >> 3, least significant first)
    offsets.bin   int64, num_samples + 1: where each sample starts, in tokens
    sources.bin   int64 pairs: index of the file and line of each sample
    meta.json     sizes, SHA-256 of each file, the report
"""
from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from megatrain.data.options import BadRow, Report

FILES = ("tokens.bin", "trained.bin", "offsets.bin", "sources.bin")
HASH_PIECE_BYTES = 4 << 20
TOKENS_AT_ONCE = 1 << 20        # written together: a few calls a row took a tenth of the time of a short chat


@dataclass(frozen=True)
class TokenDataset:
    """Tokenised samples, read-only, mapped from the cache folder.

    `digest` names tokens, flags and bounds: two datasets with one digest train the same. `is_documents`: samples
    are documents that may be cut anywhere (format `text`), not units that stay whole.
    """
    folder: Path
    report: Report
    is_documents: bool
    digest: str
    pad_id: int
    tokens: np.ndarray          # uint16 | uint32, (num_tokens,)
    offsets: np.ndarray         # int64, (num_samples + 1,)
    files: tuple[str, ...]
    _trained: np.ndarray        # uint8, bits
    _sources: np.ndarray        # int64, (num_samples, 2)

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    def trained(self, start: int, stop: int) -> np.ndarray:
        """Trained flags (bool) of tokens [start, stop)."""
        first = start >> 3
        bits = np.unpackbits(self._trained[first:(stop + 7) >> 3], bitorder="little")
        return bits[start - 8 * first:stop - 8 * first].view(bool)

    def source(self, sample_id: int) -> tuple[str, int]:
        """The file and the line a sample came from."""
        index, line = self._sources[sample_id]
        return self.files[index], int(line)


class TokenWriter:
    """Collects samples in a folder beside the final one; `commit` moves it into place, leaving without removes it."""

    def __init__(self, cache_dir: Path, key: str, token_dtype: np.dtype) -> None:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = cache_dir / key
        self._temporary = cache_dir / f"{key}.tmp-{secrets.token_hex(8)}"
        self._temporary.mkdir(mode=0o700)
        self._dtype = token_dtype
        self._streams = ExitStack()
        self._tokens = self._streams.enter_context(open(self._temporary / "tokens.bin", "xb"))  # noqa: SIM115
        self._trained = self._streams.enter_context(open(self._temporary / "trained.bin", "xb"))  # noqa: SIM115
        self._bad = self._streams.enter_context(open(self._temporary / "bad_rows.jsonl", "x", encoding="utf-8"))  # noqa: SIM115
        self._ids: list[np.ndarray] = [np.zeros(0, token_dtype)]        # not yet written
        self._flags: list[np.ndarray] = [np.zeros(0, bool)]             # nor these, of up to seven tokens more
        self._num_waiting = 0
        self._offsets = array("q", [0])
        self._sources = array("q")
        self._num_trained = 0

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._streams.close()
        shutil.rmtree(self._temporary, ignore_errors=True)      # gone already after a commit

    @property
    def num_tokens(self) -> int:
        return self._offsets[-1]

    @property
    def num_trained(self) -> int:
        return self._num_trained + sum(int(np.count_nonzero(flags)) for flags in self._flags)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(np.frombuffer(self._offsets, np.int64))

    def add(self, ids: np.ndarray, trained: np.ndarray, file_index: int, line: int) -> None:
        """Append one sample."""
        self._ids.append(ids)
        self._flags.append(trained)
        self._num_waiting += len(ids)
        if self._num_waiting >= TOKENS_AT_ONCE:
            self._write_waiting()
        self._offsets.append(self._offsets[-1] + len(ids))
        self._sources.extend((file_index, line))

    def _write_waiting(self) -> None:
        """What waits is written, but for the flags that fill no whole byte."""
        self._tokens.write(np.concatenate(self._ids).astype(self._dtype).tobytes())
        flags = np.concatenate(self._flags)
        whole = len(flags) & ~7
        self._trained.write(np.packbits(flags[:whole], bitorder="little").tobytes())
        self._num_trained += int(np.count_nonzero(flags[:whole]))
        self._ids, self._flags, self._num_waiting = [np.zeros(0, self._dtype)], [flags[whole:]], 0

    def add_bad(self, row: BadRow) -> None:
        """Note one row that was left out."""
        self._bad.write(json.dumps(asdict(row)) + "\n")

    def commit(self, report: Report, *, is_documents: bool, pad_id: int, files: Sequence[str]) -> None:
        """Make the folder appear under its final name, whole; a folder that is there already (another process wrote
        the same) stays."""
        self._write_waiting()
        self._trained.write(np.packbits(self._flags[0], bitorder="little").tobytes())
        self._streams.close()
        (self._temporary / "offsets.bin").write_bytes(self._offsets.tobytes())
        (self._temporary / "sources.bin").write_bytes(self._sources.tobytes())
        meta = {
            "dtype": self._dtype.name, "is_documents": is_documents, "pad_id": pad_id,
            "sha256": {name: file_sha256(self._temporary / name) for name in FILES},
            "report": asdict(replace(report, bad_rows=())),
            "bad_rows": [[files.index(bad.file), bad.line, bad.reason] for bad in report.bad_rows],
        }
        (self._temporary / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        try:
            os.rename(self._temporary, self.folder)
        except OSError:
            if not (self.folder / "meta.json").is_file():
                raise


def open_dataset(folder: Path, files: Sequence[str]) -> TokenDataset | None:
    """The dataset in a cache folder, every byte checked; None when there is none or it is damaged.

    `files` are the data files' present names: the folder is keyed by content, so they may have moved.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if any(file_sha256(folder / name) != digest for name, digest in meta["sha256"].items()):
            return None
    except (OSError, ValueError):
        return None
    bounds = {name: meta["sha256"][name] for name in ("tokens.bin", "trained.bin", "offsets.bin")}
    digest = hashlib.sha256(json.dumps([meta["dtype"], meta["is_documents"], bounds]).encode()).hexdigest()
    return TokenDataset(
        folder=folder, report=_report(meta, files), is_documents=meta["is_documents"], digest=digest,
        pad_id=meta["pad_id"], tokens=np.memmap(folder / "tokens.bin", meta["dtype"], "r"),
        offsets=np.memmap(folder / "offsets.bin", np.int64, "r"), files=tuple(files),
        _trained=np.memmap(folder / "trained.bin", np.uint8, "r"),
        _sources=np.memmap(folder / "sources.bin", np.int64, "r").reshape(-1, 2))


def _report(meta: dict[str, Any], files: Sequence[str]) -> Report:
    fields = dict(meta["report"])
    fields["bad_rows"] = tuple(BadRow(files[index], line, reason) for index, line, reason in meta["bad_rows"])
    fields["length_histogram"] = {int(bound): count for bound, count in fields["length_histogram"].items()}
    fields["warnings"] = tuple(fields["warnings"])
    return Report(**fields)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as stream:
        while piece := stream.read(HASH_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()

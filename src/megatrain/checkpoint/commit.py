"""The commit protocol: a checkpoint is whole or not there, and what is there proves that it is whole.

Written into checkpoints/step-N.tmp-<uuid>/, every file durable and hashed in blocks; then manifest.json (sizes, hashes,
and its own hash), durable; then one rename to checkpoints/step-N and the parent folder made durable. Only then is the
step saved. The newest checkpoint that passes verification wins at load, by number; LATEST is a hint for people.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatrain.checkpoint.export import write_bytes
from megatrain.checkpoint.fs import (
    BLOCK_BYTES,
    HASH_THREADS,
    FileRecord,
    Files,
    cannot_read,
    read_exactly,
    read_small,
    remove_tree,
)
from megatrain.checkpoint.safetensors_file import read_header
from megatrain.errors import CheckpointError, ModelError
from megatrain.memory import drop_page_cache
from megatrain.planner.sizes import SLACK_DISK_BYTES
from megatrain.strict_json import strict_json

CHECKPOINTS = "checkpoints"
MANIFEST = "manifest.json"
TRAINER = "state/trainer.json"
FORMAT = 1
MIN_KEEP = 2
_MAX_MANIFEST_BYTES = 1 << 30
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_TEMPORARY = re.compile(r"(step-[0-9]+|LATEST|BEST)\.tmp-[0-9a-f]{32}")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. `skipped`: one sentence for each newer one that was damaged and passed over."""

    path: Path
    step: int
    manifest: Mapping[str, Any]  # "files", "step", "precision", "versions", "run" (what the caller added)
    trainer_state: Mapping[str, Any]
    skipped: tuple[str, ...] = ()


class Commit:
    """A checkpoint in the making. Put durable files into `folder`, `add` their records, then `commit` or `abort`."""

    def __init__(self, run_dir: Path, step: int, needed_bytes: int, keep: int, files: Files) -> None:
        """Refuses, before a byte is written: keep < 2, a full disk, a step that is already saved."""
        check_keep(keep)
        self.step, self._keep, self._files, self._run_dir = step, keep, files, run_dir
        self._parent = run_dir / CHECKPOINTS
        self._records: dict[str, FileRecord] = {}
        if not files.is_folder(self._parent):
            files.make_folder(self._parent)
            files.sync_folder(run_dir)
            files.sync_folder(run_dir.parent)
        self._sweep()
        self._final = self._parent / f"step-{step}"
        if files.is_folder(self._final):
            self._remove_damaged()
        free_bytes, wanted_bytes = files.free_bytes(self._parent), needed_bytes + SLACK_DISK_BYTES
        if wanted_bytes > free_bytes:
            raise CheckpointError(
                f"{self._parent}: a checkpoint needs {wanted_bytes:,} bytes, {free_bytes:,} are free "
                f"(save_total_limit keeps {keep}, one more while saving); free disk space or lower save_total_limit"
            )
        self.folder = self._parent / f"step-{step}.tmp-{uuid.uuid4().hex}"
        for folder in (self.folder, self.folder / "model", self.folder / "state"):
            files.make_folder(folder)

    def add(self, name: str, record: FileRecord) -> None:
        """Tells the manifest of a file, by its path below `folder`."""
        assert name not in self._records, f"{name} written twice"
        self._records[name] = record

    def commit(self, facts: Mapping[str, Any], best_step: int | None = None) -> Path:
        """Makes the checkpoint permanent, then prunes; after this, no crash loses it. The manifest gets `facts`.

        `best_step`: BEST names its checkpoint, if that is there, and pruning spares it.
        """
        files = self._files
        files_facts = {name: [list(block) for block in record.blocks] for name, record in self._records.items()}
        body = {**facts, "format": FORMAT, "step": self.step, "files": files_facts}
        for folder in ("model", "state"):
            files.sync_folder(self.folder / folder)
        write_bytes(files, self.folder / MANIFEST, _encode_manifest(body))
        files.sync_folder(self.folder)
        files.rename(self.folder, self._final)
        files.sync_folder(self._parent)
        self._point("LATEST", self._final)
        best = self._parent / f"step-{best_step}"
        if best_step is not None and files.is_folder(best):
            self._point("BEST", best)
        self._prune(best)
        return self._final

    def abort(self) -> None:
        """Removes what was written; a committed checkpoint stays."""
        remove_tree(self._files, self.folder)

    def _sweep(self) -> None:
        """Removes what killed runs left unfinished."""
        for folder in (self._parent, self._run_dir):
            for name in self._files.names(folder):
                if not _TEMPORARY.fullmatch(name):
                    continue
                if self._files.is_folder(folder / name):
                    remove_tree(self._files, folder / name)
                else:
                    self._files.remove_file(folder / name)

    def _remove_damaged(self) -> None:
        """A damaged checkpoint of this step makes room; a valid one is never replaced."""
        try:
            verify(self._files, self._final)
        except CheckpointError:
            self._discard(self._final)
            return
        raise CheckpointError(f"{self._final} is already there and valid; move it away to save this step again")

    def _discard(self, path: Path) -> None:
        """Removes a checkpoint; killed halfway, what is left is no checkpoint any more."""
        doomed = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex}")
        self._files.rename(path, doomed)
        remove_tree(self._files, doomed)

    def _point(self, name: str, target: Path) -> None:
        temporary = self._run_dir / f"{name}.tmp-{uuid.uuid4().hex}"
        write_bytes(self._files, temporary, f"{CHECKPOINTS}/{target.name}\n".encode())
        self._files.rename(temporary, self._run_dir / name)

    def _prune(self, best: Path) -> None:
        """Keeps the newest `keep` whole checkpoints and `best`; whole as far as sizes and manifest tell.

        Anything newer stays and is not counted: a step after the one just saved was passed over at resume: it is
        damaged, even where its sizes are right.
        """
        whole = 0
        for step, path in _steps(self._files, self._parent):
            if step > self.step:
                continue
            if whole >= self._keep and path != best:
                self._discard(path)
            elif _looks_whole(self._files, path):
                whole += 1


def check_keep(keep: int) -> None:
    """CheckpointError unless at least two checkpoints are kept: with one, a crash while pruning could lose all."""
    if keep < MIN_KEEP:
        raise CheckpointError(f"save_total_limit is {keep}; at least {MIN_KEEP} checkpoints must be kept")


def load_checkpoint(run_dir: Path, which: Literal["auto"] | Path, files: Files | None = None) -> Checkpoint | None:
    """The checkpoint to resume from, verified byte for byte.

    "auto": the newest valid one of the run; None if the run has none yet, CheckpointError if all are damaged.
    A path: that one, or CheckpointError if it is damaged, or if the run already has a newer one.
    """
    files = files or Files()
    steps = _steps(files, run_dir / CHECKPOINTS)
    if which != "auto":
        checkpoint = _verified(files, Path(which), ())
        newest = max((step for step, _ in steps), default=-1)
        if newest > checkpoint.step:
            raise CheckpointError(
                f"{run_dir} already has step-{newest}, newer than {which}; move the newer checkpoints away, "
                "or go on in a new output_dir"
            )
        return checkpoint
    skipped: tuple[str, ...] = ()
    for _, path in steps:
        try:
            return _verified(files, path, skipped)
        except CheckpointError as damage:
            skipped = (*skipped, str(damage))
    if skipped:
        raise CheckpointError(
            f"no checkpoint of {run_dir} is valid: {'; '.join(skipped)}; put one back from a copy, or start again in "
            "another output_dir"
        )
    return None


def size_of_tree(folder: Path) -> int:
    """Bytes on the disk of all files below `folder`; 0 if it is not there. Files that go meanwhile do not count."""
    total_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total_bytes += path.lstat().st_blocks * 512
    return total_bytes


def open_step(run_dir: Path, step: int, files: Files | None = None, *, below: str = "") -> Checkpoint:
    """The checkpoint of `step`, to read and not to resume from. `below` ("model/"): verify those files alone."""
    return _verified(files or Files(), run_dir / CHECKPOINTS / f"step-{step}", (), below)


def _verified(files: Files, path: Path, skipped: tuple[str, ...], below: str = "") -> Checkpoint:
    manifest = verify(files, path, below)
    if TRAINER not in manifest["files"]:
        raise CheckpointError(f"{path / MANIFEST}: lists no {TRAINER}; this is no training checkpoint")
    trainer = read_small(files, path / TRAINER, _MAX_MANIFEST_BYTES, CheckpointError)
    trainer_state = strict_json(trainer, path / TRAINER, CheckpointError)
    return Checkpoint(path, manifest["step"], manifest, trainer_state, skipped)


def verify(files: Files, path: Path, below: str = "") -> dict[str, Any]:
    """The manifest, once every byte of every file matches it; else CheckpointError naming the file and the tensor.

    `below`: only files whose name starts so are read, and the trainer's state.
    """
    manifest = _read_manifest(files, path)
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        for name, blocks in manifest["files"].items():
            if name.startswith(below) or name == TRAINER:
                _verify_file(files, path / name, blocks, pool)
    return manifest


def _verify_file(files: Files, path: Path, blocks: list[tuple[int, str]], pool: ThreadPoolExecutor) -> None:
    try:
        fd = files.open(path)
        try:
            _check_size(files, fd, path, blocks)
            starts_bytes = [0]
            for size_bytes, _ in blocks:
                starts_bytes.append(starts_bytes[-1] + size_bytes)

            def intact(index: int) -> bool:
                data = bytearray(blocks[index][0])
                read_exactly(files, fd, data, starts_bytes[index], path)
                return hashlib.sha256(data).hexdigest() == blocks[index][1]

            for index, good in enumerate(pool.map(intact, range(len(blocks)))):
                if not good:
                    start, stop = starts_bytes[index], starts_bytes[index + 1]
                    tensors = _tensors_in(files, fd, path, start, stop)
                    raise CheckpointError(f"{path} is damaged in bytes {start:,} to {stop:,}{tensors}")
            drop_page_cache(fd)
        finally:
            files.close(fd)
    except OSError as failure:
        raise CheckpointError(cannot_read(path, failure)) from failure


def _check_size(files: Files, fd: int, path: Path, blocks: list[tuple[int, str]]) -> None:
    file_bytes, saved_bytes = files.size_bytes(fd), sum(size_bytes for size_bytes, _ in blocks)
    if file_bytes != saved_bytes:
        raise CheckpointError(f"{path} is damaged: {file_bytes:,} bytes long, {saved_bytes:,} were saved")


def _tensors_in(files: Files, fd: int, path: Path, start: int, stop: int) -> str:
    """Names the tensors in bytes [start, stop) of a safetensors file, as far as its header can still be read."""
    if path.suffix != ".safetensors":
        return ""
    try:
        tensors = read_header(files, fd, path)
    except (ModelError, OSError):
        return ", in its header"
    hit = [name for name, info in tensors.items() if info.start_bytes < stop and start < info.stop_bytes]
    return f": tensor {', '.join(hit)}" if hit else ", in its header"


def _looks_whole(files: Files, path: Path) -> bool:
    """The manifest is intact and every file has its size; contents are not read."""
    try:
        for name, blocks in _read_manifest(files, path)["files"].items():
            fd = files.open(path / name)
            try:
                _check_size(files, fd, path / name, blocks)
            finally:
                files.close(fd)
    except (CheckpointError, OSError):
        return False
    return True


def _steps(files: Files, parent: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every committed checkpoint, newest first by number."""
    found = [(int(match[1]), parent / match[0]) for match in map(_STEP.fullmatch, files.names(parent)) if match]
    return sorted(found, reverse=True)


def _encode_manifest(body: Mapping[str, Any]) -> bytes:
    """The manifest's bytes: canonical JSON whose member "sha256" is the hash of the canonical rest."""
    digest = hashlib.sha256(_canonical(body)).hexdigest()
    return _canonical({**body, "sha256": digest})


def _canonical(members: Mapping[str, Any]) -> bytes:
    return json.dumps(members, indent=1, sort_keys=True, allow_nan=False).encode()


def _read_manifest(files: Files, path: Path) -> dict[str, Any]:
    """The manifest, if each of its bytes is as written, and sane; else CheckpointError naming it."""
    where = path / MANIFEST
    data = read_small(files, where, _MAX_MANIFEST_BYTES, CheckpointError)
    members = strict_json(data, where, CheckpointError)
    body = {key: value for key, value in members.items() if key != "sha256"}
    if _encode_manifest(body) != data:
        raise CheckpointError(f"{where} is damaged: it does not match its own hash")
    if body.get("format") != FORMAT:
        raise CheckpointError(f"{where}: format {body.get('format')!r}, this version of megatrain reads {FORMAT}")
    if path.name != f"step-{body['step']}" and _STEP.fullmatch(path.name):
        raise CheckpointError(f"{where} is of step {body['step']}; the folder was renamed")
    for name, blocks in body["files"].items():
        parts = name.split("/")
        sizes_bytes = [size_bytes for size_bytes, _ in blocks]
        if not {"", ".", ".."}.isdisjoint(parts) or any(not 0 < size <= BLOCK_BYTES for size in sizes_bytes):
            raise CheckpointError(f"{where}: file name {name!r} or its block sizes cannot be used")
    return body

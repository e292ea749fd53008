"""DiskFile: one preallocated, nameless file, carved into extents that travel whole between disk and host memory.

Scratch space, not a checkpoint: one generation, gone with the process. The checksum of every piece is kept in memory,
so that torn, stale, flipped and misplaced bytes show at the next read.

Plain system calls from threads, not io_uring: with 8 pieces of 8 MiB in flight they reach the disk's own rate.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import DiskError, PlanError
from megatrain.hardware.disk import (
    BLOCK_BYTES,
    IN_FLIGHT,
    PIECE_BYTES,
    RAM_FILESYSTEMS,
    filesystem,
    nameless_file,
    set_direct,
)

_FAILING = "the disk or the memory is failing; look at dmesg and at the drive's SMART log, then resume"


class Calls:
    """The system calls that move bytes. Tests override them. Python itself repeats what a signal interrupts."""

    def read(self, fd: int, buffer: memoryview, offset_bytes: int) -> int:
        return os.preadv(fd, [buffer], offset_bytes)

    def write(self, fd: int, buffer: memoryview, offset_bytes: int) -> int:
        return os.pwritev(fd, [buffer], offset_bytes)

    def reserve(self, fd: int, num_bytes: int) -> None:
        os.posix_fallocate(fd, 0, num_bytes)


class _Piece(NamedTuple):
    extent: str
    offset_bytes: int  # in the file
    buffer: memoryview


class DiskFile:
    """Extents of one file in `folder`: `table` maps name to bytes. An extent never written reads as zeros.

    PlanError if the folder has no room. `direct` says whether transfers bypass the page cache; `note` is a sentence for
    the user if the file system refuses that, or is none that keeps bytes out of RAM. One reader and one writer may work
    at the same time, on different extents. The file has no name from the start: nothing is left behind, whatever
    happens.
    """

    def __init__(self, folder: Path, table: Mapping[str, int], calls: Calls | None = None) -> None:
        self.folder = folder
        self.num_bytes = 0
        self.read_bytes = 0  # moved since the start
        self.written_bytes = 0
        self._calls = calls or Calls()
        self._extents: dict[str, tuple[int, int]] = {}  # name -> (offset, padded size), bytes
        for name, size_bytes in table.items():
            self._extents[name] = (self.num_bytes, padded(size_bytes))
            self.num_bytes += padded(size_bytes)
        self._sums: dict[int, int] = {}  # offset of a piece -> its checksum; absent: never written
        self._fd = self._create()
        self.direct = set_direct(self._fd)
        self.note = _note(folder, self.direct)
        self._readers = ThreadPoolExecutor(IN_FLIGHT, "megatrain-disk-read")
        self._writers = ThreadPoolExecutor(IN_FLIGHT, "megatrain-disk-write")

    def _create(self) -> int:
        try:
            fd = nameless_file(self.folder)
        except OSError as failure:
            raise DiskError(
                f"no scratch file can be made in {self.folder}: {failure}; choose another folder"
            ) from failure
        try:
            self._calls.reserve(fd, max(self.num_bytes, BLOCK_BYTES))
        except OSError as failure:
            figures = os.fstatvfs(fd)
            os.close(fd)
            free_bytes = figures.f_bavail * figures.f_frsize
            raise PlanError(
                f"{self.folder}: {self.num_bytes:,} bytes of scratch space are needed, {free_bytes:,} are free "
                f"({failure.strerror}); free disk space, choose another folder, or lower memory.disk"
            ) from failure
        return fd

    def read(self, extents: Sequence[tuple[str, Tensor]]) -> None:
        """Fills each buffer with the bytes last written to its extent; DiskError where they are not the same bytes.

        A buffer is 1-D uint8 in RAM, page-aligned, of the extent's padded size.
        """
        written = []
        for piece in self._pieces(extents):
            if piece.offset_bytes in self._sums:
                written.append(piece)
            else:
                np.frombuffer(piece.buffer, dtype=np.uint8).fill(0)
        _all(self._readers, self._read, written)
        self.read_bytes += sum(piece.buffer.nbytes for piece in written)

    def write(self, extents: Sequence[tuple[str, Tensor]]) -> None:
        """Stores each buffer, as `read` takes it, in its extent."""
        pieces = self._pieces(extents)
        _all(self._writers, self._write, pieces)
        if not self.direct:
            self._sync()
            for piece in pieces:
                self._forget(piece)
        self.written_bytes += sum(piece.buffer.nbytes for piece in pieces)

    def close(self) -> None:
        """Ends the threads and gives the space back; no transfer may be going on."""
        self._readers.shutdown()
        self._writers.shutdown()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _pieces(self, extents: Sequence[tuple[str, Tensor]]) -> list[_Piece]:
        pieces = []
        for name, buffer in extents:
            offset_bytes, size_bytes = self._extents[name]
            if buffer.dtype != torch.uint8 or buffer.shape != (size_bytes,) or buffer.data_ptr() % BLOCK_BYTES:
                raise ValueError(
                    f"{name}: a buffer of {tuple(buffer.shape)} {buffer.dtype}; page-aligned uint8 of "
                    f"{size_bytes} bytes is needed"
                )
            memory = buffer.numpy().data
            for start in range(0, size_bytes, PIECE_BYTES):
                pieces.append(_Piece(name, offset_bytes + start, memory[start : start + PIECE_BYTES]))
        return pieces

    def _read(self, piece: _Piece) -> None:
        self._move(self._calls.read, "read", piece)
        if not self.direct:
            self._forget(piece)
        if _checksum(piece) != self._sums[piece.offset_bytes]:
            raise DiskError(f"{self._where(piece)} came back from the disk changed: {_FAILING}")

    def _write(self, piece: _Piece) -> None:
        checksum = _checksum(piece)
        self._move(self._calls.write, "written", piece)
        self._sums[piece.offset_bytes] = checksum

    def _move(self, call: Callable[[int, memoryview, int], int], verb: str, piece: _Piece) -> None:
        """The whole piece, in as many calls as it takes."""
        done = 0
        while done < piece.buffer.nbytes:
            try:
                moved = call(self._fd, piece.buffer[done:], piece.offset_bytes + done)
            except OSError as failure:
                remedy = "free disk space" if failure.errno == errno.ENOSPC else _FAILING
                raise DiskError(f"{self._where(piece)} cannot be {verb}: {failure.strerror}; {remedy}") from failure
            moved -= moved % BLOCK_BYTES  # go on at a whole block
            if moved <= 0:
                raise DiskError(f"{self._where(piece)} cannot be {verb}: the file ends there; {_FAILING}")
            done += moved

    def _sync(self) -> None:
        """Only pages that are on the disk can be forgotten."""
        try:
            os.fdatasync(self._fd)
        except OSError as failure:
            raise DiskError(
                f"the scratch file of {self.folder} cannot be written: {failure.strerror}; {_FAILING}"
            ) from failure

    def _forget(self, piece: _Piece) -> None:
        os.posix_fadvise(self._fd, piece.offset_bytes, piece.buffer.nbytes, os.POSIX_FADV_DONTNEED)

    def _where(self, piece: _Piece) -> str:
        first = piece.offset_bytes - self._extents[piece.extent][0]
        last = first + piece.buffer.nbytes
        return f"{piece.extent}, bytes {first:,} to {last:,}, in the scratch file of {self.folder}"


def _note(folder: Path, direct: bool) -> str | None:
    kind = filesystem(folder, Path("/proc/self/mountinfo").read_text("utf-8"))
    if kind in RAM_FILESYSTEMS:
        return f"{folder} is a {kind}: what lives on disk takes RAM there; choose a folder on a disk"
    if not direct:
        return f"{folder} ({kind}) refuses O_DIRECT: what lives on disk passes through the page cache, which is slower"
    return None


def padded(num_bytes: int) -> int:
    """`num_bytes` in whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _checksum(piece: _Piece) -> int:
    """The library's CRC-32: it lets go of the interpreter, and at 4 GB/s a thread is cheap beside a disk."""
    return zlib.crc32(piece.buffer)


def _all(pool: ThreadPoolExecutor, work: Callable[[_Piece], None], pieces: Sequence[_Piece]) -> None:
    """Every piece by the pool. An error comes once no piece is in progress any more, as their buffers may go then."""
    futures = [pool.submit(work, piece) for piece in pieces]
    wait(futures, return_when=FIRST_EXCEPTION)
    begun = [future for future in futures if not future.cancel()]
    wait(begun)
    for future in begun:
        future.result()

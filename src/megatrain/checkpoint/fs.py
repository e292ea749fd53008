"""Files: every file operation of this room, so that a test can fail, delay or forget any one of them.

Created files are 0600 and new (O_EXCL), created folders 0700; the last part of a path is never followed through a
symbolic link. Python itself repeats calls that a signal interrupts (EINTR).
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatrain.errors import UserError
from megatrain.memory import drop_page_cache

Data = bytes | bytearray | memoryview

BLOCK_BYTES = 16 << 20  # at most so much is written, read or hashed at once
HASH_THREADS = min(8, os.cpu_count() or 1)


class Files:
    """The real file system. Tests override single methods."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, 0o700)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def reserve(self, fd: int, num_bytes: int) -> None:
        """Takes the disk space now, so that a full disk shows before data is written."""
        os.posix_fallocate(fd, 0, num_bytes)

    def write(self, fd: int, data: Data) -> int:
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def open(self, path: Path) -> int:
        """For reading, a regular file only. O_NONBLOCK: opening a pipe would else wait for a writer, for ever."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return fd

    def read(self, fd: int, buffer: Data, offset_bytes: int) -> int:
        return os.preadv(fd, [buffer], offset_bytes)

    def size_bytes(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def names(self, path: Path) -> list[str]:
        """Names in a folder; none when there is no such folder."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def is_folder(self, path: Path) -> bool:
        return path.is_dir() and not path.is_symlink()

    def remove_file(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def free_bytes(self, path: Path) -> int:
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written: consecutive blocks of (bytes, SHA-256 in hexadecimal)."""

    blocks: tuple[tuple[int, str], ...]

    @property
    def num_bytes(self) -> int:
        return sum(size_bytes for size_bytes, _ in self.blocks)


def write_hashed(files: Files, path: Path, pieces: Iterable[Data], num_bytes: int) -> FileRecord:
    """Creates a file of `num_bytes` from pieces of at most BLOCK_BYTES, each hashed as one block; durable on return.

    Hashing runs on other threads beside the writing; a piece must keep its bytes until this returns.
    """
    pending: deque[tuple[int, Future[str]]] = deque()
    blocks: list[tuple[int, str]] = []
    fd = files.create(path)
    try:
        if num_bytes:
            files.reserve(fd, num_bytes)
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            for piece in pieces:
                data = memoryview(piece).cast("B")
                pending.append((data.nbytes, pool.submit(_sha256, data)))
                _write_all(files, fd, data)
                if len(pending) > HASH_THREADS:
                    size_bytes, digest = pending.popleft()
                    blocks.append((size_bytes, digest.result()))
        blocks += [(size_bytes, digest.result()) for size_bytes, digest in pending]
        files.fsync(fd)
        drop_page_cache(fd)
    finally:
        files.close(fd)
    record = FileRecord(tuple(blocks))
    assert record.num_bytes == num_bytes, f"{path}: {record.num_bytes} bytes written of {num_bytes}"
    return record


def read_exactly(files: Files, fd: int, buffer: Data, offset_bytes: int, path: Path) -> None:
    """Fills `buffer` from the file at `offset_bytes`; an early end of the file is an OSError."""
    data = memoryview(buffer).cast("B")
    done_bytes = 0
    while done_bytes < data.nbytes:
        count = files.read(fd, data[done_bytes : done_bytes + BLOCK_BYTES], offset_bytes + done_bytes)
        if count == 0:
            raise OSError(errno.EIO, f"the file ends at byte {offset_bytes + done_bytes}", str(path))
        done_bytes += count


def read_small(files: Files, path: Path, limit_bytes: int, error: type[UserError]) -> bytes:
    """The whole of a small file; larger than the limit, a symbolic link or unreadable is the given error."""
    try:
        fd = files.open(path)
        try:
            size_bytes = files.size_bytes(fd)
            if size_bytes > limit_bytes:
                raise error(f"{path}: {size_bytes:,} bytes, more than the {limit_bytes:,} such a file may have")
            data = bytearray(size_bytes)
            read_exactly(files, fd, data, 0, path)
        finally:
            files.close(fd)
    except OSError as failure:
        raise error(cannot_read(path, failure)) from failure
    return bytes(data)


def cannot_read(path: Path, failure: OSError) -> str:
    """One sentence for a file that could not be opened or read."""
    if failure.errno == errno.ELOOP:
        return f"{path} is a symbolic link, which is not followed; put the file itself there"
    return f"{path} cannot be read: {failure.strerror or failure}"


def remove_tree(files: Files, path: Path) -> None:
    """Removes a folder, if there, and all in it; symbolic links are removed, not followed."""
    if not files.is_folder(path):
        return
    for name in files.names(path):
        if files.is_folder(path / name):
            remove_tree(files, path / name)
        else:
            files.remove_file(path / name)
    files.remove_folder(path)


def _write_all(files: Files, fd: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[files.write(fd, data) :]


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()

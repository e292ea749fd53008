"""Files without a name, and rates of the disk beneath a folder, past the page cache where it lets one. Torch-free."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from megatrain.hardware.measured import Disk

PIECE_BYTES = 8 << 20
BLOCK_BYTES = 4096  # O_DIRECT wants addresses, offsets and lengths in whole blocks
IN_FLIGHT = 8  # pieces at a time, here and where segments live on disk
FREE_SHARE = 10  # never more than a tenth of the free space
RAM_FILESYSTEMS = ("tmpfs", "ramfs")  # nothing to measure

Transfer = Callable[[int, list[mmap.mmap], int], int]


def measure_disk(folder: Path, cap_bytes: int, limit_s: float, mountinfo: str) -> Disk:
    """Writes up to `cap_bytes` into a file of `folder` (or its nearest existing parent), for a third of `limit_s`;
    writes them again and reads them back, a third each: a file that grows is written more slowly. It has no name from
    the start, so nothing can be left behind. OSError: no writing.
    """
    home = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    figures = os.statvfs(home)
    free_bytes = figures.f_bavail * figures.f_frsize
    kind = filesystem(home, mountinfo)
    num_pieces = min(cap_bytes, free_bytes // FREE_SHARE) // PIECE_BYTES
    if num_pieces == 0 or kind in RAM_FILESYSTEMS:
        return Disk(kind, free_bytes, False, 0.0, 0.0)
    fd = nameless_file(home)
    buffers = [_random_piece() for _ in range(IN_FLIGHT)]
    try:
        direct = set_direct(fd)
        there = _transfer(fd, os.pwritev, buffers, num_pieces, time.perf_counter() + limit_s / 3)
        os.fsync(fd)
        started = time.perf_counter()
        written = _transfer(fd, os.pwritev, buffers, there // PIECE_BYTES, started + limit_s / 3)
        os.fsync(fd)
        write_s = time.perf_counter() - started
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        read = _transfer(fd, os.preadv, buffers, there // PIECE_BYTES, started + limit_s / 3)
        read_s = time.perf_counter() - started
    finally:
        os.close(fd)
        for buffer in buffers:
            buffer.close()
    return Disk(kind, free_bytes, direct, written / write_s, read / read_s)


def filesystem(folder: Path, mountinfo: str) -> str:
    """Type of the file system that holds `folder`, from the text of /proc/self/mountinfo: "ext4"."""
    found, longest, place = "unknown", -1, folder.resolve()
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        mount = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        if place.is_relative_to(mount) and len(mount.parts) >= longest:  # a later mount covers an earlier one
            found, longest = after.split()[0], len(mount.parts)
    return found


def nameless_file(folder: Path) -> int:
    """A new file of `folder`, open; without a name, so that nothing is left behind, whatever happens."""
    path = folder / f".megatrain-scratch-{uuid.uuid4().hex}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    return fd


def set_direct(fd: int) -> bool:
    """Sets O_DIRECT, if the file system takes a write with it (some take the flag alone): zeros, to the first block."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwritev(fd, [block], 0)
        except OSError:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
            return False
    return True


def _random_piece() -> mmap.mmap:
    """Page-aligned memory, as O_DIRECT asks; random, as some file systems and disks compress."""
    piece = mmap.mmap(-1, PIECE_BYTES)
    piece[:] = np.random.default_rng().bytes(PIECE_BYTES)
    return piece


def _transfer(fd: int, call: Transfer, buffers: list[mmap.mmap], num_pieces: int, deadline: float) -> int:
    """Bytes moved by one thread a buffer, piece after piece of the file, until the pieces or the time run out."""
    numbers = iter(range(num_pieces))
    with ThreadPoolExecutor(len(buffers)) as pool:
        return sum(pool.map(lambda buffer: sum(_moves(fd, call, buffer, numbers, deadline)), buffers))


def _moves(fd: int, call: Transfer, buffer: mmap.mmap, numbers: Iterator[int], deadline: float) -> Iterator[int]:
    for number in numbers:
        yield call(fd, [buffer], number * PIECE_BYTES)
        if time.perf_counter() >= deadline:
            return

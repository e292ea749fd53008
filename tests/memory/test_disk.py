"""The scratch file of a run: what is written comes back, and every way in which it may not is told."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain.errors import DiskError, PlanError
from megatrain.hardware.disk import BLOCK_BYTES
from megatrain.memory import DiskFile, HostArena, disk, padded
from megatrain.memory.disk import Calls

PIECE = 4 * BLOCK_BYTES  # small, so that extents have several


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "PIECE_BYTES", PIECE)


def buffer(num_bytes: int, seed: int | None = None) -> Tensor:
    """A page-aligned buffer of the padded size; random bytes of `seed`, else 0xEE."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    found = HostArena(padded(num_bytes)).view(0, padded(num_bytes), torch.uint8)
    if seed is None:
        return found.fill_(0xEE)
    generator = torch.Generator().manual_seed(seed)
    return found.copy_(torch.randint(0, 256, found.shape, dtype=torch.uint8, generator=generator))


class Faulty(Calls):
    """Real calls, save that the one numbered `at` (from 0, reads and writes apart) goes through `fault`."""

    def __init__(self, verb: str, at: int, fault: Callable[[int, memoryview, int], int]) -> None:
        self.verb, self.at, self.fault = verb, at, fault
        self.count = 0
        self.lock = threading.Lock()

    def _turn(self, verb: str) -> bool:
        if verb != self.verb:
            return False
        with self.lock:
            self.count += 1
            return self.count - 1 == self.at

    def read(self, fd: int, buffer: memoryview, offset_bytes: int) -> int:
        return (self.fault if self._turn("read") else os_read)(fd, buffer, offset_bytes)

    def write(self, fd: int, buffer: memoryview, offset_bytes: int) -> int:
        return (self.fault if self._turn("write") else os_write)(fd, buffer, offset_bytes)


def os_read(fd: int, buffer: memoryview, offset_bytes: int) -> int:
    return os.preadv(fd, [buffer], offset_bytes)


def os_write(fd: int, buffer: memoryview, offset_bytes: int) -> int:
    return os.pwritev(fd, [buffer], offset_bytes)


def raising(number: int) -> Callable[..., int]:
    def fault(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return fault


# ---- what is written comes back


SIZES = {"a": 1, "b": BLOCK_BYTES, "none": 0, "c": PIECE, "d": 3 * PIECE + 5, "e": PIECE - 1}


@pytest.mark.parametrize("direct", [True, False])
def test_every_extent_comes_back_and_touches_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool):
    if not direct:
        monkeypatch.setattr(disk, "set_direct", lambda _: False)
    file = DiskFile(tmp_path, SIZES)
    assert file.num_bytes == sum(map(padded, SIZES.values()))
    kept = {name: buffer(size, seed) for seed, (name, size) in enumerate(SIZES.items())}
    file.write([(name, kept[name]) for name in ("d", "a", "none")])
    file.write([(name, kept[name]) for name in ("b", "c", "e")])
    again = buffer(SIZES["d"], 99)
    file.write([("d", again)])
    kept["d"] = again
    found = {name: buffer(size) for name, size in SIZES.items()}
    file.read(list(found.items()))
    assert all(torch.equal(found[name], kept[name]) for name in SIZES)
    assert file.read_bytes == file.num_bytes
    assert file.written_bytes == file.num_bytes + padded(SIZES["d"])
    file.close()


@pytest.mark.parametrize(
    ("kind", "direct", "says"),
    [
        ("ext4", True, None),
        ("nfs", False, "(nfs) refuses O_DIRECT: what lives on disk passes through the page cache"),
        ("tmpfs", True, "is a tmpfs: what lives on disk takes RAM there; choose a folder on a disk"),
        ("tmpfs", False, "is a tmpfs"),
    ],
)
def test_a_folder_that_is_slow_or_no_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, direct: bool, says: str | None
):
    monkeypatch.setattr(disk, "set_direct", lambda _: direct)
    monkeypatch.setattr(disk, "filesystem", lambda *_: kind)
    file = DiskFile(tmp_path, {"a": 1})
    assert file.direct == direct
    assert (file.note is None) if says is None else (file.note or "").startswith(f"{tmp_path} {says}")
    file.close()


def test_what_was_never_written_is_zero_and_costs_no_reading(tmp_path: Path):
    file = DiskFile(tmp_path, {"a": 2 * PIECE, "b": PIECE})
    file.write([("b", buffer(PIECE, 1))])
    found = buffer(2 * PIECE)
    file.read([("a", found)])
    assert not found.any()
    assert file.read_bytes == 0
    file.close()


def test_the_file_has_no_name_and_takes_its_space_at_once(tmp_path: Path):
    numbers: list[int] = []

    class Reserving(Calls):
        def reserve(self, fd: int, num_bytes: int) -> None:
            super().reserve(fd, num_bytes)
            numbers.extend([os.fstat(fd).st_blocks * 512, os.fstat(fd).st_nlink])

    file = DiskFile(tmp_path, {"a": 1 << 20}, Reserving())
    assert list(tmp_path.iterdir()) == []
    assert numbers[0] >= 1 << 20
    assert numbers[1] == 0
    file.close()


def test_a_reader_and_a_writer_work_at_the_same_time(tmp_path: Path):
    file = DiskFile(tmp_path, {"a": 8 * PIECE, "b": 8 * PIECE})
    first, second, found = buffer(8 * PIECE, 1), buffer(8 * PIECE, 2), buffer(8 * PIECE)
    file.write([("a", first)])
    writer = threading.Thread(target=lambda: [file.write([("b", second)]) for _ in range(20)])
    writer.start()
    for _ in range(20):
        file.read([("a", found.fill_(0xEE))])
        assert torch.equal(found, first)
    writer.join()
    file.read([("b", found)])
    assert torch.equal(found, second)
    file.close()


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(BLOCK_BYTES, dtype=torch.float32),
        buffer(2 * BLOCK_BYTES),
        buffer(2 * BLOCK_BYTES)[1 : 1 + BLOCK_BYTES],
    ],
    ids=["floats", "too long", "askew"],
)
def test_a_buffer_that_does_not_fit_is_refused(tmp_path: Path, wrong: Tensor):
    file = DiskFile(tmp_path, {"a": BLOCK_BYTES})
    with pytest.raises(ValueError, match=r"a: a buffer of .* page-aligned uint8 of 4096 bytes"):
        file.write([("a", wrong)])
    file.close()


# ---- faults


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("part_bytes", [BLOCK_BYTES, BLOCK_BYTES + 7, 3 * BLOCK_BYTES])
def test_short_calls_are_gone_on_with(tmp_path: Path, verb: str, at: int, part_bytes: int):
    real = os_read if verb == "read" else os_write

    def short(fd: int, part: memoryview, offset_bytes: int) -> int:
        real(fd, part[: padded(part_bytes)], offset_bytes)
        return part_bytes

    file = DiskFile(tmp_path, {"a": 3 * PIECE}, Faulty(verb, at, short))
    kept, found = buffer(3 * PIECE, 1), buffer(3 * PIECE)
    file.write([("a", kept)])
    file.read([("a", found)])
    assert torch.equal(found, kept)
    file.close()


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize(
    ("verb", "number", "says"),
    [
        ("write", errno.ENOSPC, "cannot be written: No space left on device; free disk space"),
        ("write", errno.EIO, "cannot be written: Input/output error; the disk or the memory is failing"),
        ("read", errno.EIO, "cannot be read: Input/output error; the disk or the memory is failing"),
    ],
)
def test_errors_of_the_disk_say_which_bytes_and_what_to_do(tmp_path: Path, verb: str, number: int, says: str, at: int):
    file = DiskFile(tmp_path, {"a": 3 * PIECE}, Faulty(verb, at, raising(number)))
    if verb == "read":
        file.write([("a", buffer(3 * PIECE, 1))])
    move = file.read if verb == "read" else file.write
    with pytest.raises(DiskError, match=r"a, bytes [\d,]+ to [\d,]+, in the scratch file of .*" + says):
        move([("a", buffer(3 * PIECE, 1))])
    file.close()


def test_a_page_cache_that_cannot_be_written_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk, "set_direct", lambda _: False)
    monkeypatch.setattr(os, "fdatasync", raising(errno.EIO))
    file = DiskFile(tmp_path, {"a": PIECE})
    with pytest.raises(DiskError, match=r"the scratch file of .* cannot be written: Input/output error"):
        file.write([("a", buffer(PIECE, 1))])
    file.close()


def test_the_end_of_the_file_is_an_error_and_no_endless_loop(tmp_path: Path):
    file = DiskFile(tmp_path, {"a": PIECE}, Faulty("read", 0, lambda *_: 0))
    file.write([("a", buffer(PIECE, 1))])
    with pytest.raises(DiskError, match="the file ends there"):
        file.read([("a", buffer(PIECE))])
    file.close()


def lost(_fd: int, part: memoryview, _offset_bytes: int) -> int:
    return part.nbytes


def torn(fd: int, part: memoryview, offset_bytes: int) -> int:
    os_write(fd, part[:BLOCK_BYTES], offset_bytes)
    return part.nbytes


@pytest.mark.parametrize("fault", [lost, torn])
@pytest.mark.parametrize("at", [3, 4, 5])  # of the second time that the extent is written
def test_lost_and_torn_writes_show_at_the_next_read(
    tmp_path: Path, fault: Callable[[int, memoryview, int], int], at: int
):
    file = DiskFile(tmp_path, {"a": 3 * PIECE}, Faulty("write", at, fault))
    file.write([("a", buffer(3 * PIECE, 1))])
    file.write([("a", buffer(3 * PIECE, 2))])
    with pytest.raises(DiskError, match="came back from the disk changed"):
        file.read([("a", buffer(3 * PIECE))])
    file.close()


def test_a_misplaced_write_shows_where_it_went_and_where_it_should_have_gone(tmp_path: Path):
    same = buffer(PIECE, 1)
    file = DiskFile(
        tmp_path,
        {"a": PIECE, "b": PIECE},
        Faulty("write", 2, lambda fd, part, offset_bytes: os_write(fd, part, offset_bytes - PIECE)),
    )
    file.write([("a", same)])
    file.write([("b", same)])
    file.write([("b", buffer(PIECE, 2))])  # goes to a
    for name in ("a", "b"):
        with pytest.raises(DiskError, match=f"{name}, bytes 0 to 16,384, .* came back from the disk changed"):
            file.read([(name, buffer(PIECE))])
    file.close()


def test_every_flipped_bit_shows(tmp_path: Path):
    flipped: list[int] = []

    def flip(fd: int, part: memoryview, offset_bytes: int) -> int:
        got = os_read(fd, part, offset_bytes)
        bit = flipped[-1]
        part[bit // 8] ^= 1 << bit % 8
        return got

    calls = Faulty("read", -1, flip)
    file = DiskFile(tmp_path, {"a": PIECE}, calls)
    kept = buffer(PIECE, 1)
    file.write([("a", kept)])
    generator = torch.Generator().manual_seed(0)
    for bit in torch.randint(0, PIECE * 8, (200,), generator=generator).tolist():
        flipped.append(bit)
        calls.at = calls.count
        with pytest.raises(DiskError, match=r"a, bytes 0 to 16,384"):
            file.read([("a", buffer(PIECE))])
    found = buffer(PIECE)
    file.read([("a", found)])
    assert torch.equal(found, kept)
    file.close()


def test_no_room_is_told_before_anything_is_written(tmp_path: Path):
    class Full(Calls):
        def reserve(self, _fd: int, _num_bytes: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PlanError, match=r"1,048,576 bytes of scratch space are needed, [\d,]+ are free .*memory\.disk"):
        DiskFile(tmp_path, {"a": 1 << 20}, Full())
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path):
    with pytest.raises(DiskError, match=r"no scratch file can be made in .*choose another folder"):
        DiskFile(tmp_path / "missing", {"a": 1})


def test_close_gives_the_file_back(tmp_path: Path):
    open_before = len(os.listdir("/proc/self/fd"))
    file = DiskFile(tmp_path, {"a": PIECE})
    file.write([("a", buffer(PIECE, 1))])
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == open_before

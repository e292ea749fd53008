"""The disk's figures: nothing is left behind, refusals are told from rates, sizes stay below their caps."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.hardware import disk
from megatrain.hardware.disk import PIECE_BYTES, filesystem, measure_disk

EXT4 = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
CAP_BYTES = 4 * PIECE_BYTES


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets that were written, in order."""
    offsets: list[int] = []
    real = os.pwritev

    def pwritev(fd: int, buffers: list[Any], offset: int) -> int:
        offsets.append(offset)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    return offsets


def without_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., int] = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def test_rates_of_a_real_folder_and_nothing_left(tmp_path: Path, written: list[int]) -> None:
    found = measure_disk(tmp_path / "not" / "yet", CAP_BYTES, 5.0, EXT4)
    assert found.filesystem == "ext4"
    assert found.write_Bps > 1e6
    assert found.read_Bps > 1e6
    assert found.free_bytes > CAP_BYTES
    assert list(tmp_path.iterdir()) == []
    probed = 0  # whether the file takes O_DIRECT
    assert sorted(written) == sorted([probed, *(2 * [i * PIECE_BYTES for i in range(4)])]), "again over what is there"


def test_the_file_has_no_name_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> int:
        assert list(tmp_path.iterdir()) == []
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", lost)
    with pytest.raises(OSError, match="Input/output error"):
        measure_disk(tmp_path, CAP_BYTES, 5.0, EXT4)


def test_no_time_still_gives_a_figure(tmp_path: Path, written: list[int]) -> None:
    assert measure_disk(tmp_path, 100 * PIECE_BYTES, 0.0, EXT4).write_Bps > 0
    assert len(written) <= 1 + 2 * disk.IN_FLIGHT


def test_o_direct_refused_by_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_direct(monkeypatch)
    found = measure_disk(tmp_path, CAP_BYTES, 5.0, EXT4)
    assert not found.direct
    assert found.write_Bps > 0


def test_o_direct_refused_by_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def pwritev(fd: int, buffers: list[Any], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    found = measure_disk(tmp_path, CAP_BYTES, 5.0, EXT4)
    assert not found.direct
    assert found.write_Bps > 0


def test_memory_is_no_disk(tmp_path: Path, written: list[int]) -> None:
    found = measure_disk(tmp_path, CAP_BYTES, 5.0, EXT4.replace("ext4", "tmpfs"))
    assert (found.filesystem, found.write_Bps, written) == ("tmpfs", 0.0, [])


def test_a_full_disk_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int]) -> None:
    figures = os.statvfs(tmp_path)
    few = os.statvfs_result((figures.f_bsize, 4096, 0, 0, 9 * PIECE_BYTES // 4096, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: few)
    found = measure_disk(tmp_path, CAP_BYTES, 5.0, EXT4)
    assert (found.free_bytes, found.write_Bps, written) == (9 * PIECE_BYTES, 0.0, [])


def test_filesystem_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    spaced = tmp_path / "with space"
    (spaced / "runs").mkdir(parents=True)
    name = str(spaced).replace(" ", r"\040")
    table = EXT4 + f"30 22 0:40 / {name} rw - xfs /dev/x rw\n31 22 0:41 / {tmp_path}/with rw - nfs4 host:/ rw\n"
    assert filesystem(spaced / "runs", table) == "xfs"
    assert filesystem(tmp_path, table) == "ext4"
    assert filesystem(spaced, table + f"32 22 0:42 / {name} rw - btrfs /dev/y rw\n") == "btrfs"
    assert filesystem(tmp_path, "") == "unknown"

"""Arenas and limits: sizes, bounds, alignment, and what /proc and cgroup files say."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from megatrain.errors import PlanError
from megatrain.memory import (
    DeviceArena,
    HostArena,
    available_ram_bytes,
    drop_page_cache,
    locked_memory_limit_bytes,
    peak_rss_bytes,
    pinned,
    register,
    reset_peak_rss,
    unregister,
)

MIB = 1 << 20
GIB = 1 << 30
CPU = torch.device("cpu")


# ---- host arena


def test_host_arena_is_zeroed_aligned_and_shared_between_views():
    arena = HostArena(3 * MIB)
    words = arena.view(0, 3 * MIB // 4, torch.int32)
    assert words.data_ptr() % 4096 == 0
    assert not words.any()
    words[1024] = 0x3F80_0000
    assert arena.view(4096, 1, torch.float32).item() == 1.0
    assert arena.view(4096, 1, torch.float32).data_ptr() == words.data_ptr() + 4096


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 2 * MIB + 1])
@pytest.mark.parametrize("threads", [1, 3])
def test_host_arena_of_any_size(num_bytes: int, threads: int):
    last = HostArena(num_bytes, threads=threads).view(num_bytes - 1, 1, torch.uint8)
    last.fill_(7)
    assert last.item() == 7


@pytest.mark.parametrize(
    ("offset_bytes", "count", "dtype"),
    [(-4, 1, torch.int32), (4092, 2, torch.int32), (4096, 1, torch.uint8), (0, -1, torch.uint8), (2, 1, torch.int32)],
)
def test_host_view_outside_or_askew_is_refused(offset_bytes: int, count: int, dtype: torch.dtype):
    with pytest.raises(ValueError, match=r"no part of|multiple"):
        HostArena(4096).view(offset_bytes, count, dtype)


@pytest.mark.parametrize("offset_bytes", [0, 2048, 4096])
def test_a_host_view_may_be_empty(offset_bytes: int):
    view = HostArena(4096).view(offset_bytes, 0, torch.bfloat16)
    assert (view.shape, view.dtype) == ((0,), torch.bfloat16)
    with pytest.raises(ValueError, match="no part of"):
        HostArena(4096).view(4098, 0, torch.bfloat16)


def test_host_arena_is_resident_at_once_and_goes_back_with_its_last_view():
    def resident_bytes() -> int:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    before = resident_bytes()
    arena = HostArena(64 * MIB)
    assert resident_bytes() - before > 60 * MIB
    view = arena.view(MIB, 8, torch.float32)
    arena.close()
    view.fill_(2.0)
    assert view.sum().item() == 16.0
    with pytest.raises(ValueError, match="closed"):
        arena.view(0, 1, torch.uint8)
    del view
    gc.collect()
    assert resident_bytes() - before < 8 * MIB


def test_host_arena_larger_than_memory_is_refused_with_both_numbers():
    with pytest.raises(PlanError, match=r"1,125,899,906,842,624 bytes are needed, [\d,]+ are available; lower"):
        HostArena(1 << 50)
    with pytest.raises(ValueError, match="positive"):
        HostArena(0)


# ---- pinning, against a runtime that counts


class FakeRuntime:
    """cudart as seen by pinned.py; refuses the registration number `refuse_at`."""

    def __init__(self, refuse_at: int | None = None) -> None:
        self.live: dict[int, int] = {}
        self.calls = 0
        self.refuse_at = refuse_at

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert flags == 0
        self.calls += 1
        if self.calls - 1 == self.refuse_at:
            return 2
        self.live[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.live.pop(address, None) else 1


def test_pinning_covers_every_byte_once_in_pieces(monkeypatch: pytest.MonkeyPatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned, "PIECE_BYTES", MIB)
    arena = HostArena(2 * MIB + 4096)
    start = arena.view(0, 1, torch.uint8).data_ptr()
    result = register([arena.view(0, arena.num_bytes, torch.uint8)])
    assert result.refused is None
    assert result.pinned_bytes == arena.num_bytes
    assert runtime.live == {start: MIB, start + MIB: MIB, start + 2 * MIB: 4096}
    unregister(result)
    assert not runtime.live
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        unregister(result)


def test_refused_pinning_leaves_nothing_pinned_and_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch):
    runtime = FakeRuntime(refuse_at=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(pinned, "PIECE_BYTES", MIB)
    cleared = []
    monkeypatch.setattr(pinned, "clear_last_error", lambda: cleared.append(True))
    result = register([HostArena(4 * MIB).view(0, 4 * MIB, torch.uint8)])
    assert result.pinned_bytes == 0
    assert result.refused is not None
    assert cleared == [True]
    assert "CUDA error 2 after 2,097,152 of 4,194,304 bytes" in result.refused
    assert not runtime.live


# ---- device arena


def test_device_arena_pieces_are_aligned_and_do_not_overlap():
    arena = DeviceArena({"W0": 1000, "nothing": 0, "G0": 257}, CPU)
    w, g = arena.view("W0", 250, torch.float32), arena.view("G0", 257, torch.uint8)
    assert w.data_ptr() % 256 == g.data_ptr() % 256 == 0
    w.fill_(1.0)
    arena.poison("G0")
    assert bool((w == 1.0).all())
    assert bool((g == 255).all())
    assert arena.view("nothing", 0, torch.int16).numel() == 0
    assert arena.view("W0", 2, torch.float32, offset_bytes=992).data_ptr() == w.data_ptr() + 992


def test_device_arena_refuses_what_is_outside():
    arena = DeviceArena({"W0": 1000}, CPU)
    for count, offset_bytes in ((251, 0), (1, 1000), (1, -4)):
        with pytest.raises(ValueError, match="no part of W0, 1000 bytes"):
            arena.view("W0", count, torch.float32, offset_bytes)
    with pytest.raises(ValueError, match="multiple of 4"):
        arena.view("W0", 1, torch.float32, 2)
    with pytest.raises(KeyError):
        arena.view("W1", 1, torch.float32)
    with pytest.raises(ValueError, match="piece bad"):
        DeviceArena({"bad": -1}, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_poison_is_nan_in_every_float(dtype: torch.dtype):
    arena = DeviceArena({"W0": 64}, CPU)
    arena.poison("W0")
    assert bool(arena.view("W0", 64 // dtype.itemsize, dtype).isnan().all())


# ---- limits, against a made-up /proc


def _proc(tmp_path: Path, cgroup: str, mounts: str, available_kib: int = 64 * MIB) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {available_kib} kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mounts)
    return proc


def _group(folder: Path, limit: str, usage: int, cache: int, *, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{usage}\n")
    key = "total_inactive_file" if v1 else "inactive_file"
    (folder / "memory.stat").write_text(f"anon 1\n{key} {cache}\nfile 5\n")


def test_available_is_mem_available_without_cgroup_limits(tmp_path: Path):
    mount = tmp_path / "cg"
    _group(mount / "job", "max", 10, 0)
    proc = _proc(tmp_path, "0::/job\n", f"31 23 0:28 / {mount} rw - cgroup2 cgroup2 rw\n", available_kib=1000)
    assert available_ram_bytes(proc) == 1_024_000


def test_available_is_bound_by_the_tightest_v2_ancestor(tmp_path: Path):
    mount = tmp_path / "cg"
    _group(mount / "a/b", str(8 * GIB), GIB, 0)
    _group(mount / "a", str(4 * GIB), 2 * GIB, GIB // 2)
    proc = _proc(tmp_path, "0::/a/b\n", f"31 23 0:28 / {mount} rw - cgroup2 cgroup2 rw\n")
    assert available_ram_bytes(proc) == 4 * GIB - 2 * GIB + GIB // 2


def test_available_is_bound_by_v1_and_ignores_other_controllers(tmp_path: Path):
    memory, cpu = tmp_path / "memory", tmp_path / "cpu"
    _group(memory / "x", str(3 * GIB), GIB, 4096, v1=True)
    _group(memory, str((1 << 63) - 4096), GIB, 0, v1=True)
    _group(cpu / "x", "1", 0, 0, v1=True)
    mounts = f"1 1 0:1 / {cpu} rw - cgroup cgroup rw,cpu\n2 1 0:2 / {memory} rw shared:7 - cgroup cgroup rw,memory\n"
    proc = _proc(tmp_path, "4:memory:/x\n1:cpu:/x\n0::/\n", mounts)
    assert available_ram_bytes(proc) == 2 * GIB + 4096


def test_available_inside_a_container_whose_mount_shows_its_own_group_only(tmp_path: Path):
    mount = tmp_path / "cg"
    _group(mount, str(2 * GIB), GIB, 0)
    proc = _proc(tmp_path, "0::/docker/abc\n", f"31 23 0:28 /docker/abc {mount} rw - cgroup2 cgroup2 rw\n")
    assert available_ram_bytes(proc) == GIB
    (proc / "self/mountinfo").write_text(f"31 23 0:28 / {mount} rw - cgroup2 cgroup2 rw\n")
    assert available_ram_bytes(proc) == GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path):
    mount = tmp_path / "cg"
    _group(mount, str(GIB), 2 * GIB, 0)
    assert available_ram_bytes(_proc(tmp_path, "0::/\n", f"1 1 0:1 / {mount} rw - cgroup2 cgroup2 rw\n")) == 0


def test_this_machine_has_memory_and_a_limit_or_none():
    assert available_ram_bytes() > 64 * MIB
    limit_bytes = locked_memory_limit_bytes()
    assert limit_bytes is None or limit_bytes >= 0


def test_peak_rss_sees_a_passing_allocation_and_can_be_reset():
    reset_peak_rss()
    before = peak_rss_bytes()
    passing = HostArena(48 * MIB)
    del passing
    gc.collect()
    assert peak_rss_bytes() - before > 40 * MIB
    reset_peak_rss()
    assert peak_rss_bytes() - before < 24 * MIB


def test_dropping_the_page_cache_keeps_the_bytes(tmp_path: Path):
    path = tmp_path / "f"
    path.write_bytes(b"x" * 10000)
    with path.open("rb") as file:
        drop_page_cache(file.fileno(), 0, 4096)
        drop_page_cache(file.fileno())
        assert file.read() == b"x" * 10000

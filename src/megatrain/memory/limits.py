"""How much host memory this process may still take, and what it took. Linux only; every figure is in bytes."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import NamedTuple

from megatrain.hardware.cgroups import PROC, cgroup_folders


def available_ram_bytes(proc: Path = PROC) -> int:
    """The least of MemAvailable and the room left in every memory cgroup (v1 and v2) from ours up to the root."""
    meminfo = (proc / "meminfo").read_text()
    rooms = [_kib_field(meminfo, "MemAvailable") * 1024]
    for folder in cgroup_folders("memory", proc):
        room_bytes = _cgroup_room_bytes(folder)
        if room_bytes is not None:
            rooms.append(room_bytes)
    return max(0, min(rooms))


def cgroup_limit_bytes(proc: Path = PROC) -> int | None:
    """The least memory limit among the cgroups (v1 and v2) from ours up to the root; None when none has one."""
    limits = [_cgroup_limit(folder) for folder in cgroup_folders("memory", proc)]
    return min((limit.limit_bytes for limit in limits if limit is not None), default=None)


def locked_memory_limit_bytes() -> int | None:
    """RLIMIT_MEMLOCK of this process; None when unlimited."""
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft_bytes == resource.RLIM_INFINITY else soft_bytes


def peak_rss_bytes() -> int:
    """The most resident memory this process ever held, or held since `reset_peak_rss` (VmHWM)."""
    return _kib_field((PROC / "self/status").read_text(), "VmHWM") * 1024


def reset_peak_rss() -> None:
    """Makes `peak_rss_bytes` start again from the memory resident now."""
    (PROC / "self/clear_refs").write_text("5")


def drop_page_cache(fd: int, offset_bytes: int = 0, num_bytes: int = 0) -> None:
    """Advises the kernel to forget cached pages of a file (0 bytes: to its end); unwritten pages stay."""
    os.posix_fadvise(fd, offset_bytes, num_bytes, os.POSIX_FADV_DONTNEED)


def _kib_field(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no {name} in a /proc file: this kernel is not supported")
    return int(found[1])


class _Limit(NamedTuple):
    limit_bytes: int
    usage_name: str
    cache_name: str


def _cgroup_limit(folder: Path) -> _Limit | None:
    """The limit and where the use is told; None when the cgroup has no limit."""
    for limit_name, usage_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (folder / limit_name).is_file():
            continue
        limit = (folder / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= 1 << 60:  # v1 writes "no limit" as a huge number
            return None
        return _Limit(int(limit), usage_name, cache_name)
    return None


def _cgroup_room_bytes(folder: Path) -> int | None:
    """Limit - usage + inactive file cache (given back under pressure); None when the cgroup has no limit."""
    limit = _cgroup_limit(folder)
    if limit is None:
        return None
    usage_bytes = int((folder / limit.usage_name).read_text())
    cache = re.search(rf"^{limit.cache_name} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
    return limit.limit_bytes - usage_bytes + (int(cache[1]) if cache else 0)

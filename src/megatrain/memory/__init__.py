"""Room card.

Holds: host arenas (mmap), their pinning, device arenas, the scratch file of a run, and what memory this process may
use.
Takes -> gives: byte counts -> typed views of memory we own; /proc and cgroup files -> byte counts.
May touch: RAM, device memory, one nameless file, /proc, cgroup files, the page cache.
Must never: know what the bytes mean.
"""

from megatrain.memory.device import DeviceArena, cap_device_memory
from megatrain.memory.disk import DiskFile, padded
from megatrain.memory.host import HostArena
from megatrain.memory.limits import (
    available_ram_bytes,
    drop_page_cache,
    locked_memory_limit_bytes,
    peak_rss_bytes,
    reset_peak_rss,
)
from megatrain.memory.pinned import Pinned, copy_in_pieces, pin, register, unregister

__all__ = [
    "DeviceArena",
    "DiskFile",
    "HostArena",
    "Pinned",
    "available_ram_bytes",
    "cap_device_memory",
    "copy_in_pieces",
    "drop_page_cache",
    "locked_memory_limit_bytes",
    "padded",
    "peak_rss_bytes",
    "pin",
    "register",
    "reset_peak_rss",
    "unregister",
]

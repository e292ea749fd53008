"""Room card.

Holds: host arenas (mmap), their pinning, device arenas, and what memory this process may use.
Takes -> gives: byte counts -> typed views of memory we own; /proc and cgroup files -> byte counts.
May touch: RAM, device memory, /proc, cgroup files, the page cache.
Must never: know what the bytes mean.
"""

from megatrain.memory.device import DeviceArena, cap_device_memory
from megatrain.memory.host import HostArena
from megatrain.memory.limits import (
    available_ram_bytes,
    drop_page_cache,
    locked_memory_limit_bytes,
    peak_rss_bytes,
    reset_peak_rss,
)
from megatrain.memory.pinned import Pinned, copy_in_pieces, register, unregister

__all__ = [
    "DeviceArena",
    "HostArena",
    "Pinned",
    "available_ram_bytes",
    "cap_device_memory",
    "copy_in_pieces",
    "drop_page_cache",
    "locked_memory_limit_bytes",
    "peak_rss_bytes",
    "register",
    "reset_peak_rss",
    "unregister",
]

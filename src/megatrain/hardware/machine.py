"""Machine: what was measured of the machine a run is planned for. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Machine:
    """Figures at the time of asking. On a CPU the hbm figures are 0: slots and homes are the same memory."""

    device: DeviceKind
    device_name: str  # "NVIDIA H200", or the processor's name
    hbm_total_bytes: int
    hbm_free_bytes: int
    ram_total_bytes: int
    ram_available_bytes: int  # the least of what the kernel and every cgroup above us leave
    disk_free_bytes: int  # of the file system that will hold the run folder
    num_cores: int  # that this process may use
    isa: str  # "x86_64 avx2"

"""Machine: what was measured of the machine a run is planned for. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator

DeviceKind = Literal["cpu", "cuda"]


def _figure(value: float) -> float:
    if 1e-12 <= value <= 1e21:  # beyond them a step would take no time, or all the time there is
        return value
    raise ValueError("give a figure from 1e-12 to 1e21")


# What a file may say of a machine: the counts and rates that there are, and those that may be 0.
Count = Annotated[int, AfterValidator(_figure)]
CountOr0 = Annotated[int, AfterValidator(lambda value: value and _figure(value))]
Rate = Annotated[float, AfterValidator(_figure)]
RateOr0 = Annotated[float, AfterValidator(lambda value: value and _figure(value))]


@dataclass(frozen=True)
class Machine:
    """Figures at the time of asking. On a CPU the hbm figures are 0: slots and homes are the same memory."""

    device: DeviceKind
    device_name: str  # "NVIDIA H200", or the processor's name
    hbm_total_bytes: CountOr0
    hbm_free_bytes: CountOr0
    ram_total_bytes: Count
    ram_available_bytes: Count  # the least of what the kernel and every cgroup above us leave
    disk_free_bytes: CountOr0  # of the file system that will hold the run folder
    num_cores: Count  # that this process may use
    isa: str  # "x86_64 avx2"

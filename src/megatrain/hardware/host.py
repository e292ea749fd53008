"""The machine without its GPU, from /proc and /sys. Torch-free."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from importlib import metadata
from pathlib import Path

from megatrain import __version__
from megatrain.hardware.cgroups import cgroup_cores, usable_cores
from megatrain.hardware.cpu import isa, processor_name
from megatrain.hardware.measured import Host

DISTRIBUTIONS = ("torch", "transformers", "triton", "numpy")


def describe_host(
    ram_available_bytes: int,
    ram_limit_bytes: int | None,
    locked_limit_bytes: int | None,
    proc: Path = Path("/proc"),
    sys: Path = Path("/sys"),
) -> Host:
    """Processor, memory and limits; the caller gives the limits, which `memory` finds."""
    cpuinfo = (proc / "cpuinfo").read_text()
    nodes = sys / "devices/system/node/online"
    return Host(
        processor=processor_name(cpuinfo),
        isa=isa(cpuinfo),
        num_cores=usable_cores(proc),
        num_numa_nodes=count_listed(nodes.read_text()) if nodes.is_file() else 1,
        ram_total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        ram_available_bytes=ram_available_bytes,
        ram_limit_bytes=ram_limit_bytes,
        locked_limit_bytes=locked_limit_bytes,
        load=os.getloadavg()[0],
        cores_limit=cgroup_cores(proc),
    )


def count_listed(text: str) -> int:
    """How many numbers the kernel's list names: "0-1,4" -> 3."""
    bounds = re.findall(r"(\d+)(?:-(\d+))?", text)
    return sum(int(last or first) - int(first) + 1 for first, last in bounds)


def versions() -> dict[str, str]:
    """Versions of what decides speed and bits; one that is not installed is left out."""
    found = {"megatrain": __version__, "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found

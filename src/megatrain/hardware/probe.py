"""Asks the machine what it has. Imports torch, for the CUDA figures only."""

from __future__ import annotations

import os
import platform
import re
import time
from pathlib import Path
from typing import Literal

import torch

from megatrain.errors import ConfigError
from megatrain.hardware.machine import Machine

MATMUL_SIZE = {"cuda": 8192, "cpu": 768}
MATMUL_TRIES = 4  # the first one warms up
ISA_FLAGS = ("avx512f", "avx2", "asimd")  # best first; the native core has a path for each


def probe(
    device: Literal["auto", "cpu", "cuda"], folder: Path, ram_available_bytes: int, proc: Path = Path("/proc")
) -> Machine:
    """The machine, with `device` chosen: auto is a GPU if torch sees one. `folder` need not exist yet."""
    cuda = torch.cuda.is_available()
    if device == "cuda" and not cuda:
        raise ConfigError("device is cuda, but torch sees no GPU; set device to cpu, or install torch for CUDA")
    chosen: Literal["cpu", "cuda"] = "cuda" if device != "cpu" and cuda else "cpu"
    free_bytes, total_bytes = torch.cuda.mem_get_info() if chosen == "cuda" else (0, 0)
    cpuinfo = (proc / "cpuinfo").read_text()
    return Machine(
        device=chosen,
        device_name=torch.cuda.get_device_name() if chosen == "cuda" else processor_name(cpuinfo),
        hbm_total_bytes=total_bytes,
        hbm_free_bytes=free_bytes,
        ram_total_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        ram_available_bytes=ram_available_bytes,
        disk_free_bytes=disk_free_bytes(folder),
        num_cores=len(os.sched_getaffinity(0)),
        isa=isa(cpuinfo),
    )


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """What the device reaches in a large matrix product, the best of a few: the measured peak that shares refer to."""
    size = MATMUL_SIZE[device.type]
    a = torch.ones(size, size, dtype=dtype, device=device)
    best_s = float("inf")
    for _ in range(MATMUL_TRIES):
        started = time.perf_counter()
        product = a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - started)
    del a, product
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size**3 / best_s


def disk_free_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write beneath the nearest existing parent of `folder`."""
    for path in (folder.absolute(), *folder.absolute().parents):
        if path.is_dir():
            figures = os.statvfs(path)
            return figures.f_bavail * figures.f_frsize
    raise ConfigError(f"output_dir {folder}: no parent folder exists; choose another place")


def processor_name(cpuinfo: str) -> str:
    """The processor's name as the kernel prints it, or the architecture where it prints none."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def isa(cpuinfo: str) -> str:
    """Architecture and the widest vector unit: "x86_64 avx2"."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = found[1].split() if found else []
    best = next((flag for flag in ISA_FLAGS if flag in flags), "")
    return f"{platform.machine()} {best}".strip()

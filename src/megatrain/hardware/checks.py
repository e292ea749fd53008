"""Judges what was measured: one line a check, OK, WARN or FAIL, with one remedy unless OK. Torch-free, no measuring.

FAIL: training on this machine will not work. WARN: it works, but something costs speed, room or safety.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatrain.hardware.disk import RAM_FILESYSTEMS
from megatrain.hardware.measured import Gpu, Measured

Verdict = Literal["OK", "WARN", "FAIL"]
GRAVEST_FIRST: tuple[Verdict, ...] = ("FAIL", "WARN")

GIB, GB = 1 << 30, 1e9
BYTES_PER_PARAM = 12  # a checkpoint's share; also what host memory holds
LEAST_RAM_BYTES, SMALL_RAM_BYTES = 2 * GIB, 16 * GIB
LEAST_DISK_BYTES, SMALL_DISK_BYTES = 1 * GIB, 50 * GIB
SLOW_LINK_Bps, SLOW_DRAM_Bps, SLOW_DISK_Bps = 10 * GB, 10 * GB, 0.3 * GB
SLOW_UPDATE_PER_S = 0.2e9
SHARED_LINK = 0.6  # of a direction alone, while both are busy
SMALL_COPY = 0.5  # a 1 MiB copy against a 256 MiB one
BAD_SLOWDOWN = 1.3
BUSY = 0.5  # processes that want a core, for each core
MOST_TAKEN = 0.2  # share of HBM that others may hold without a word
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "ceph", "lustre")


@dataclass(frozen=True)
class Check:
    """One line of the doctor. `remedy` is empty exactly when the verdict is OK."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


def judge(measured: Measured) -> tuple[Check, ...]:
    """Every check that applies, in the order a reader wants them."""
    return tuple(itertools.chain.from_iterable(check(measured) for check in CHECKS))


def worst(checks: tuple[Check, ...]) -> Verdict:
    """The gravest verdict."""
    for verdict in GRAVEST_FIRST:
        if any(check.verdict == verdict for check in checks):
            return verdict
    return "OK"


def _one(name: str, found: str, *complaints: tuple[bool, Verdict, str]) -> list[Check]:
    """A check with the first complaint that holds, gravest first; OK if none does."""
    for holds, verdict, remedy in complaints:
        if holds:
            return [Check(name, verdict, found, remedy)]
    return [Check(name, "OK", found)]


def _failed(measured: Measured, key: str, remedy: str) -> list[Check]:
    """What to say where a figure is missing: nothing if it was not tried."""
    reason = measured.failed.get(key)
    return [] if reason is None else [Check(key, "FAIL", f"could not be measured: {reason}", remedy)]


def _gpu(m: Measured) -> list[Check]:
    if "gpu" in m.failed:
        return _failed(m, "gpu", "update the GPU's driver, or set device: cpu")
    if m.gpu is None:
        if m.driver_without_torch is not None:
            remedy = "install the torch build for this driver's CUDA version (pytorch.org, Get Started)"
            return [Check("gpu", "FAIL", f"{m.driver_without_torch} is here, but torch cannot use it", remedy)]
        remedy = "use a machine with an NVIDIA GPU; on the CPU only tiny models train in good time"
        return [Check("gpu", "WARN", "none", remedy)]
    gpu = m.gpu
    ecc = {True: ", ECC on", False: ", ECC off", None: ""}[gpu.ecc]
    capability = ".".join(map(str, gpu.capability))
    found = f"{gpu.name}, compute capability {capability}, driver {gpu.driver or 'unknown'}{ecc}"
    old = "use precision: fp32, or a GPU of compute capability 8.0 or more: this one has no bf16"
    return _one("gpu", found, (gpu.capability < (8, 0), "WARN", old))


def _hbm(m: Measured) -> list[Check]:
    if m.gpu is None:
        return []
    taken = 1 - m.gpu.hbm_free_bytes / m.gpu.hbm_total_bytes
    found = f"{m.gpu.hbm_free_bytes / GIB:.1f} of {m.gpu.hbm_total_bytes / GIB:.1f} GiB free"
    busy = "end the other programs on this GPU (nvidia-smi lists them)"
    return _one("hbm", found, (taken > MOST_TAKEN, "WARN", busy))


def _ram(m: Measured) -> list[Check]:
    host = m.host
    limit = host.ram_limit_bytes
    limited = limit is not None and limit < 0.9 * host.ram_total_bytes
    said = "no cgroup limit" if limit is None else f"cgroup limit {limit / GIB:.1f} GiB"
    found = (
        f"{host.ram_available_bytes / GIB:.1f} of {host.ram_total_bytes / GIB:.1f} GiB available, {said}; "
        f"room for {host.ram_available_bytes / BYTES_PER_PARAM / 1e9:.1f} B parameters"
    )
    more = "end other programs, or use a machine with more RAM: 12 bytes a parameter are needed"
    return _one(
        "ram",
        found,
        (host.ram_available_bytes < LEAST_RAM_BYTES, "FAIL", more),
        (limited, "WARN", "raise the container's or job's memory limit to use the whole machine"),
        (host.ram_available_bytes < SMALL_RAM_BYTES, "WARN", more),
    )


def _cpu(m: Measured) -> list[Check]:
    host = m.host
    nodes = f"{host.num_numa_nodes} NUMA node" + "s" * (host.num_numa_nodes != 1)
    limit = "" if host.cores_limit is None else f" (cgroup limit {host.cores_limit:g})"
    found = f"{host.processor}, {host.isa}, {host.num_cores} cores{limit}, {nodes}, load {host.load:.1f}"
    return _one(
        "cpu",
        found,
        (" " not in host.isa, "WARN", "use a processor with AVX2 or NEON: updates take several times longer here"),
        (
            host.load > BUSY * host.num_cores,
            "WARN",
            "measure again when the machine is idle: these figures are too low",
        ),
        (host.num_cores < 4, "WARN", "give this process at least 4 cores: updates and copies share them"),
    )


def _native(m: Measured) -> list[Check]:
    if m.native_isas:
        return [Check("native core", "OK", f"C++ optimizer, {m.native_isas[-1]}")]
    remedy = "install a C++ compiler (apt install g++) and reinstall megatrain"
    return [Check("native core", "WARN", "missing: numpy does the updates, same bits but slower", remedy)]


def _dram(m: Measured) -> list[Check]:
    if m.dram_copy_Bps is None:
        return _failed(m, "dram", "free some RAM and try again")
    slow = "fill every memory channel with the same modules, and give the process more cores"
    found = f"{m.dram_copy_Bps / GB:.1f} GB/s (read + write) by {m.host.num_cores} threads"
    return _one("dram", found, (m.dram_copy_Bps < SLOW_DRAM_Bps, "WARN", slow))


def _update(m: Measured) -> list[Check]:
    if m.update_params_per_s is None:
        return _failed(m, "update", "reinstall megatrain: its optimizer core does not run here")
    found = f"{m.update_params_per_s / 1e9:.2f} Gparam/s: {8e9 / m.update_params_per_s:.1f} s a step for 8 B parameters"
    slow = "give the process more cores, or keep more state in HBM (raise memory.hbm)"
    return _one("update", found, (m.update_params_per_s < SLOW_UPDATE_PER_S, "WARN", slow))


def _pin(m: Measured) -> list[Check]:
    if m.gpu is None:
        return []
    limit = m.host.locked_limit_bytes
    said = "unlimited" if limit is None else f"{limit / GIB:.2f} GiB"
    if m.pin is None:
        return _failed(m, "pin limit", "update the GPU's driver, or raise `ulimit -l`")
    found = f"{m.pin.pinned_bytes / GIB:.1f} of {m.pin.tried_bytes / GIB:.1f} GiB tried were pinned; ulimit -l {said}"
    if m.pin.status:
        found += f"; CUDA error {m.pin.status}"
    remedy = "raise `ulimit -l` and the container's memory limit (WSL: memory= in .wslconfig); unpinned copies are slow"
    return _one("pin limit", found, (m.pin.status != 0, "WARN", remedy))


def _link(m: Measured) -> list[Check]:
    if m.gpu is None:
        return []
    if m.link is None:
        return _failed(m, "pcie", "let host memory be pinned (see pin limit) and try again")
    link = m.link
    found = (
        f"to the GPU {link.h2d_Bps / GB:.1f}, back {link.d2h_Bps / GB:.1f}, "
        f"both at once {link.both_h2d_Bps / GB:.1f} + {link.both_d2h_Bps / GB:.1f} GB/s{_lanes(m.gpu)}"
    )
    slow = min(link.h2d_Bps, link.d2h_Bps) < SLOW_LINK_Bps
    shared = min(link.both_h2d_Bps / link.h2d_Bps, link.both_d2h_Bps / link.d2h_Bps) < SHARED_LINK
    curve = ", ".join(f"{size_bytes >> 20} MiB {rate / GB:.1f}" for size_bytes, rate in link.small)
    small = "turn on huge pages and the performance governor: short copies pay too much to start"
    return _one(
        "pcie",
        found,
        (_narrow(m.gpu), "WARN", "put the GPU into a slot with all its lanes, or take out the card that shares them"),
        (slow, "WARN", "check slot and PCIe generation in the firmware: layers arrive slowly, so use larger batches"),
        (shared, "WARN", "turn off IOMMU translation for the GPU (iommu=pt): both directions share one path"),
    ) + _one("small copies", f"GB/s by size: {curve}", (_steep(link.small), "WARN", small))


def _lanes(gpu: Gpu) -> str:
    return "" if gpu.pcie_width is None else f", x{gpu.pcie_width} of x{gpu.pcie_width_max}"


def _narrow(gpu: Gpu) -> bool:
    return gpu.pcie_width is not None and gpu.pcie_width_max is not None and gpu.pcie_width < gpu.pcie_width_max


def _steep(small: tuple[tuple[int, float], ...]) -> bool:
    return small[0][1] < SMALL_COPY * small[-1][1]


def _matmul(m: Measured) -> list[Check]:
    if not m.matmul_flops_per_s:
        return _failed(m, "matmul", "install a torch build with kernels for this device (pytorch.org, Get Started)")
    rates = m.matmul_flops_per_s
    found = ", ".join(f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in rates.items()) + " sustained"
    unused = m.gpu is not None and m.gpu.capability >= (8, 0) and rates["bf16"] < 2 * rates["fp32"]
    slow = "look at clocks and power limit with nvidia-smi -q: bf16 should be several times faster than fp32"
    return _one("matmul", found, (unused, "WARN", slow))


def _attention(m: Measured) -> list[Check]:
    if m.attention_flops_per_s is None:
        remedy = "it needs triton, a C compiler, Python's headers and compute capability 8.0: install what is missing"
        return _failed(m, "attention", remedy)
    return [Check("attention", "OK", f"bf16 {m.attention_flops_per_s / 1e12:.3g} TFLOP/s, deterministic, sustained")]


def _hbm_rate(m: Measured) -> list[Check]:
    if m.hbm_Bps is None:
        return _failed(m, "hbm rate", "free some HBM and try again")
    return [Check("hbm rate", "OK", f"{m.hbm_Bps / GB:.0f} GB/s (read + write)")]


def _slowdown(m: Measured) -> list[Check]:
    if not m.dma_slowdown:
        return _failed(m, "dma slowdown", "free some HBM and try again")
    found = ", ".join(f"{kernel} × {ratio:.2f}" for kernel, ratio in m.dma_slowdown.items()) + " while both copies run"
    slow = "look for a power cap (nvidia-smi -q -d POWER): copies should hardly slow the kernels"
    return _one("dma slowdown", found, (max(m.dma_slowdown.values()) > BAD_SLOWDOWN, "WARN", slow))


def _disk(m: Measured) -> list[Check]:
    if m.disk is None:
        return _failed(m, "disk", "choose an output folder you may write to")
    disk = m.disk
    found = (
        f"{disk.filesystem}, {disk.free_bytes / GIB:.0f} GiB free: checkpoints of "
        f"{disk.free_bytes / BYTES_PER_PARAM / 1e9:.1f} B parameters"
    )
    network = disk.filesystem in NETWORK_FILESYSTEMS or disk.filesystem.startswith("fuse")
    room = "free some space, or choose another output folder: a checkpoint takes 12 bytes a parameter"
    return _one(
        "disk space",
        found,
        (disk.free_bytes < LEAST_DISK_BYTES, "FAIL", room),
        (disk.filesystem in RAM_FILESYSTEMS, "WARN", "choose a folder on a disk: this one is RAM, lost at reboot"),
        (disk.filesystem == "overlay", "WARN", "mount a volume for runs: a container's own layer goes with it"),
        (network, "WARN", "choose a folder on a local disk: a network share is slow, and may sync late"),
        (disk.free_bytes < SMALL_DISK_BYTES, "WARN", room),
    )


def _disk_rate(m: Measured) -> list[Check]:
    if m.disk is None or m.disk.write_Bps == 0.0:
        return []
    disk = m.disk
    way = "O_DIRECT" if disk.direct else "through the page cache"
    found = f"write {disk.write_Bps / GB:.2f}, read {disk.read_Bps / GB:.2f} GB/s, {way}"
    return _one(
        "disk rate",
        found,
        (not disk.direct, "WARN", "choose a folder on ext4 or xfs: without O_DIRECT the disk is slower, and takes RAM"),
        (disk.write_Bps < SLOW_DISK_Bps, "WARN", "choose a folder on an NVMe disk, or save less often (save_steps)"),
    )


def _versions(m: Measured) -> list[Check]:
    found = ", ".join(f"{name} {version}" for name, version in m.versions.items())
    missing = m.gpu is not None and "triton" not in m.versions
    return _one("versions", found, (missing, "WARN", "pip install triton: updates on the GPU need it"))


def _cache(m: Measured) -> list[Check]:
    reason = m.failed.get("cache")
    remedy = "set XDG_CACHE_HOME to a folder you may write to"
    return [] if reason is None else [Check("cache", "WARN", f"the figures could not be kept: {reason}", remedy)]


CHECKS: tuple[Callable[[Measured], list[Check]], ...] = (
    _gpu, _hbm, _ram, _cpu, _native, _dram, _update, _pin, _link, _matmul, _attention, _hbm_rate, _slowdown, _disk,
    _disk_rate, _versions, _cache,
)  # fmt: skip

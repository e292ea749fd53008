"""Asks the machine what it has. The one file of this room that imports torch."""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from megatrain.errors import ConfigError
from megatrain.hardware.cgroups import usable_cores
from megatrain.hardware.cpu import isa, processor_name
from megatrain.hardware.gpu import LARGE_BYTES, Direction, Kernel, ask_smi
from megatrain.hardware.machine import Machine
from megatrain.hardware.measured import Gpu

CUDA = torch.device("cuda")
Span = tuple[torch.cuda.Event, torch.cuda.Event]  # its start and its end
MATMUL_SIZE = {"cuda": 8192, "cpu": 768}
# Products whose best is the peak: how many of which size; the first one warms up. On a CPU small ones besides: one is
# over before other programs get their turn, so a busy machine shows its peak, too (185 GFLOP/s; the large ones had 30).
PEAK_PRODUCTS = {"cuda": {8192: 4}, "cpu": {768: 4, 384: 32}}
MATMULS_PER_LOOK = {"cuda": 8, "cpu": 1}  # between two looks at the clock


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
        num_cores=usable_cores(proc),
        isa=isa(cpuinfo),
    )


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """What the device reaches in a matrix product, the best of some: the measured peak that shares refer to."""
    best_flops_per_s = 0.0
    for size, tries in PEAK_PRODUCTS[device.type].items():
        a = torch.ones(size, size, dtype=dtype, device=device)
        for _ in range(tries):
            started = time.perf_counter()
            product = a @ a
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best_flops_per_s = max(best_flops_per_s, 2 * size**3 / (time.perf_counter() - started))
        del a, product
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return best_flops_per_s


def disk_free_bytes(folder: Path) -> int:
    """Bytes an ordinary user may still write beneath the nearest existing parent of `folder`."""
    for path in (folder.absolute(), *folder.absolute().parents):
        if path.is_dir():
            figures = os.statvfs(path)
            return figures.f_bavail * figures.f_frsize
    raise ConfigError(f"output_dir {folder}: no parent folder exists; choose another place")


def sustained_matmul_flops_per_s(device: torch.device, dtype: torch.dtype, limit_s: float) -> float:
    """What the device keeps up in products of random numbers; random, as zeros draw less power."""
    size, per_look = MATMUL_SIZE[device.type], MATMULS_PER_LOOK[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 * sustained_per_s(lambda: torch.mm(a, b, out=out), device, per_look, limit_s)


def sustained_per_s(work: Callable[[], object], device: torch.device, per_look: int, limit_s: float) -> float:
    """How often a second `work` is done in the second half of `limit_s`, with a look at the clock every `per_look`.

    The second half, as the first second ran 10 % faster on an H200. Before the clock starts `work` is done once: where
    that compiled a kernel, one look took longer than all of `limit_s`, and attention seemed to run at a 79th.
    """

    def done(times: int) -> float:
        """When so many more were done."""
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    marks_s = [done(1)]
    while marks_s[-1] - marks_s[0] < limit_s:
        marks_s.append(done(per_look))
    first = min(bisect.bisect_left(marks_s, marks_s[0] + limit_s / 2), len(marks_s) - 2)
    return per_look * (len(marks_s) - 1 - first) / (marks_s[-1] - marks_s[first])


def describe_gpu() -> Gpu | None:
    """The GPU that training would use; None if torch sees none."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    smi = ask_smi(str(properties.uuid))
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        hbm_total_bytes=total_bytes,
        hbm_free_bytes=free_bytes,
        driver=smi and smi.driver,
        ecc=smi and smi.ecc,
        pcie_width=smi and smi.pcie_width,
        pcie_width_max=smi and smi.pcie_width_max,
    )


def clear_last_error() -> None:
    """After a refusal by CUDA, which keeps it as its last error: the framework would raise it at the next kernel."""
    with contextlib.suppress(torch.AcceleratorError):
        torch.zeros(1, device=CUDA)


class TorchGpu:
    """`gpu.Device` on the current CUDA device. Made in a `with`: afterwards nothing of it is pinned or on the GPU."""

    def __init__(self) -> None:
        runtime = torch.cuda.cudart()
        assert runtime is not None
        self._runtime = runtime
        self._pinned: list[torch.Tensor] = []
        self._lanes: dict[Direction, tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]] = {}  # (stream, to, from)
        self._kernels: dict[Kernel, Callable[[], object]] = {}

    def __enter__(self) -> TorchGpu:
        return self

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self.unpin_all()
        self._kernels.clear()
        torch.cuda.empty_cache()

    def pin(self, num_bytes: int) -> int:
        """Page-locks a new host buffer and keeps it; CUDA's status, 0 when done."""
        buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        status = int(self._runtime.cudaHostRegister(buffer.data_ptr(), num_bytes, 0))
        if status == 0:
            self._pinned.append(buffer)
        else:
            clear_last_error()
        return status

    def unpin_all(self) -> None:
        """Gives back every buffer of `pin`, and the copy lanes, which live in such buffers."""
        self._lanes.clear()
        while self._pinned:
            self._runtime.cudaHostUnregister(self._pinned.pop().data_ptr())

    def copy_s(self, directions: tuple[Direction, ...], num_bytes: int, repeats: int) -> dict[Direction, float]:
        """Seconds until `repeats` pinned copies were done, for each of the directions, started together."""
        self._open_lanes()
        torch.cuda.synchronize()
        marks: dict[Direction, Span] = {
            direction: self._issue(direction, num_bytes, repeats) for direction in directions
        }
        torch.cuda.synchronize()
        return {direction: start.elapsed_time(end) / 1e3 for direction, (start, end) in marks.items()}

    def kernel_s(self, kernel: Kernel, repeats: int, copies: int) -> float:
        """Seconds of `repeats` kernels in a row while `copies` copies of LARGE_BYTES go each way."""
        self._open_lanes()
        self._make_kernels()
        torch.cuda.synchronize()
        for direction in self._lanes:
            self._issue(direction, LARGE_BYTES, copies)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            self._kernels[kernel]()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def _issue(self, direction: Direction, num_bytes: int, repeats: int) -> Span:
        stream, target, source = self._lanes[direction]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target, source = target[:num_bytes], source[:num_bytes]
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(repeats):
                target.copy_(source, non_blocking=True)
            end.record()
        return start, end

    def _open_lanes(self) -> None:
        if self._lanes:
            return
        for direction in ("h2d", "d2h"):
            status = self.pin(LARGE_BYTES)
            if status != 0:
                raise RuntimeError(f"pinning {LARGE_BYTES:,} bytes was refused with CUDA error {status}")
            host, there = self._pinned[-1], torch.ones(LARGE_BYTES, dtype=torch.uint8, device=CUDA)
            target, source = (there, host) if direction == "h2d" else (host, there)
            self._lanes[direction] = (torch.cuda.Stream(), target, source)

    def _make_kernels(self) -> None:
        if self._kernels:
            return
        size = MATMUL_SIZE["cuda"]
        a, b = (torch.randn(size, size, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
        x, y = (torch.randn(LARGE_BYTES // 4, device=CUDA) for _ in range(2))
        product, total = torch.empty_like(a), torch.empty_like(x)
        self._kernels["matmul"] = lambda: torch.mm(a, b, out=product)
        self._kernels["add"] = lambda: torch.add(x, y, out=total)

"""What is measured of a GPU, over the few things asked of it; `probe.TorchGpu` is the real one. Torch-free."""

from __future__ import annotations

import subprocess
import time
from typing import Literal, NamedTuple, Protocol

from megatrain.hardware.measured import Link, Pin

Direction = Literal["h2d", "d2h"]
Kernel = Literal["matmul", "add"]  # bound by arithmetic; bound by HBM

MIB = 1 << 20
FIRST_PIN_BYTES, LARGEST_PIN_BYTES = 64 * MIB, 1 << 30
SMALL_BYTES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
LARGE_BYTES = SMALL_BYTES[-1]
LINK_BYTES = 4 << 30  # moved for each figure
SMALL_LINK_BYTES = 1 << 30
KERNEL_S = 0.3  # of a kernel alone, long against the start of a copy
SMI_FIELDS = "name,driver_version,ecc.mode.current,pcie.link.width.current,pcie.link.width.max"
SMI_LIMIT_S = 10.0


class Device(Protocol):
    """A GPU with room for copies of up to LARGE_BYTES each way, and kernels to time."""

    def pin(self, num_bytes: int) -> int:
        """Page-locks a new host buffer and keeps it; CUDA's status, 0 when done."""
        ...

    def unpin_all(self) -> None:
        """Gives back every buffer of `pin`."""
        ...

    def copy_s(self, directions: tuple[Direction, ...], num_bytes: int, repeats: int) -> dict[Direction, float]:
        """Seconds until `repeats` pinned copies were done, for each of the directions, started together."""
        ...

    def kernel_s(self, kernel: Kernel, repeats: int, copies: int) -> float:
        """Seconds of `repeats` kernels in a row while `copies` copies of LARGE_BYTES go each way."""
        ...


class Smi(NamedTuple):
    """One line of nvidia-smi; None where it says [N/A]."""

    name: str
    driver: str
    ecc: bool | None
    pcie_width: int | None
    pcie_width_max: int | None


def ask_smi(gpu_uuid: str | None) -> Smi | None:
    """What nvidia-smi says of this GPU, or of the first; None without it, or when it does not answer."""
    chosen = [] if gpu_uuid is None else [f"--id=GPU-{gpu_uuid}"]
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader,nounits", *chosen]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_smi(answer.stdout)


def parse_smi(text: str) -> Smi | None:
    """The first line of nvidia-smi's answer; None if it is no answer."""
    fields = [part.strip() for part in text.partition("\n")[0].split(",")]
    if len(fields) != len(Smi._fields):
        return None
    name, driver, ecc, width, width_max = fields
    return Smi(name, driver, {"Enabled": True, "Disabled": False}.get(ecc), _number(width), _number(width_max))


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def measure_pin(device: Device, cap_bytes: int, limit_s: float) -> Pin:
    """Page-locks pieces of 64 MiB, then twice as much, up to 1 GiB, until the cap, the time or a refusal."""
    deadline = time.monotonic() + limit_s
    pinned_bytes, piece_bytes, status = 0, FIRST_PIN_BYTES, 0
    try:
        while status == 0 and pinned_bytes + piece_bytes <= cap_bytes and time.monotonic() < deadline:
            status = device.pin(piece_bytes)
            if status == 0:
                pinned_bytes += piece_bytes
                piece_bytes = min(2 * piece_bytes, LARGEST_PIN_BYTES)
    finally:
        device.unpin_all()
    return Pin(pinned_bytes, pinned_bytes + (piece_bytes if status else 0), status)


def measure_link(device: Device) -> Link:
    """Large copies each way alone, then both ways at once, then smaller and smaller ones to the GPU."""
    device.copy_s(("h2d", "d2h"), LARGE_BYTES, 1)  # warms up
    repeats = LINK_BYTES // LARGE_BYTES
    moved_bytes = repeats * LARGE_BYTES
    h2d_s = device.copy_s(("h2d",), LARGE_BYTES, repeats)["h2d"]
    d2h_s = device.copy_s(("d2h",), LARGE_BYTES, repeats)["d2h"]
    both_s = device.copy_s(("h2d", "d2h"), LARGE_BYTES, repeats)
    return Link(
        h2d_Bps=moved_bytes / h2d_s,
        d2h_Bps=moved_bytes / d2h_s,
        both_h2d_Bps=moved_bytes / both_s["h2d"],
        both_d2h_Bps=moved_bytes / both_s["d2h"],
        small=tuple((size_bytes, _small_Bps(device, size_bytes)) for size_bytes in SMALL_BYTES),
    )


def _small_Bps(device: Device, size_bytes: int) -> float:
    repeats = SMALL_LINK_BYTES // size_bytes
    return repeats * size_bytes / device.copy_s(("h2d",), size_bytes, repeats)["h2d"]


def measure_hbm_Bps(device: Device) -> float:
    """Bytes read and written a second by sums of large vectors."""
    repeats = _repeats(device, "add")
    return 3 * LARGE_BYTES * repeats / device.kernel_s("add", repeats, 0)


def _repeats(device: Device, kernel: Kernel) -> int:
    """How many of a kernel take KERNEL_S; it is warm then."""
    device.kernel_s(kernel, 1, 0)
    return max(4, round(KERNEL_S / (device.kernel_s(kernel, 4, 0) / 4)))


def measure_slowdown(device: Device, link: Link) -> dict[str, float]:
    """Kernel -> its time while both copy lanes are busy throughout, over its time alone."""
    found = {}
    slower_Bps = min(link.both_h2d_Bps, link.both_d2h_Bps)
    for kernel in ("matmul", "add"):
        repeats = _repeats(device, kernel)
        alone_s = device.kernel_s(kernel, repeats, 0)
        copies = 1 + round(2 * alone_s * slower_Bps / LARGE_BYTES)  # busy for twice as long: also a halved kernel
        found[kernel] = device.kernel_s(kernel, repeats, copies) / alone_s
    return found

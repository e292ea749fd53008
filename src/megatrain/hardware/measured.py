"""Measured: every figure `megatrain doctor` takes of a machine, and its file. Torch-free; rates are bytes a second."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from pydantic import TypeAdapter, ValidationError

from megatrain.hardware.machine import Count, CountOr0, Rate, RateOr0

FORMAT: Final = 2  # of the file; another number is no file of ours


@dataclass(frozen=True)
class Host:
    """The machine without its GPU. `ram_limit_bytes`: the least cgroup limit, None when there is none."""

    processor: str
    isa: str
    num_cores: Count  # that this process may use
    num_numa_nodes: int
    ram_total_bytes: Count
    ram_available_bytes: Count
    ram_limit_bytes: int | None
    locked_limit_bytes: int | None  # RLIMIT_MEMLOCK; None when unlimited
    load: float  # processes that wanted a core, over the last minute, before anything was measured
    cores_limit: float | None = None  # of processor time, the least of all cgroups; None when there is none


@dataclass(frozen=True)
class Gpu:
    """The GPU as torch and nvidia-smi describe it; None where nvidia-smi does not say."""

    name: str
    capability: tuple[int, int]
    hbm_total_bytes: Count
    hbm_free_bytes: CountOr0
    driver: str | None
    ecc: bool | None
    pcie_width: int | None
    pcie_width_max: int | None


@dataclass(frozen=True)
class Pin:
    """How much host memory CUDA page-locked of what was tried; status 0 when nothing was refused."""

    pinned_bytes: int
    tried_bytes: int
    status: int


@dataclass(frozen=True)
class Link:
    """Copies between pinned host memory and the GPU; `small`: (bytes of a copy, rate to the GPU)."""

    h2d_Bps: Rate
    d2h_Bps: Rate
    both_h2d_Bps: Rate
    both_d2h_Bps: Rate
    small: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Disk:
    """The file system of the output folder; `direct`: O_DIRECT worked, so the rates are the disk's own."""

    filesystem: str
    free_bytes: CountOr0
    direct: bool
    write_Bps: RateOr0  # 0.0, as is read_Bps: not measured, in RAM or too little room
    read_Bps: RateOr0


@dataclass(frozen=True)
class Measured:
    """One machine. A figure is None, or missing from its table, where it was not taken; `failed` says why if it was
    tried: measurement -> reason."""

    measured_at: str  # ISO 8601, UTC
    host: Host
    versions: Mapping[str, str]  # distribution -> version, and python
    native_isas: tuple[str, ...]  # of the C++ core; empty: numpy does the updates
    gpu: Gpu | None = None
    driver_without_torch: str | None = None  # a GPU that nvidia-smi sees and torch does not
    pin: Pin | None = None
    link: Link | None = None
    dram_copy_Bps: Rate | None = None  # bytes read + bytes written
    update_params_per_s: Rate | None = None
    matmul_flops_per_s: Mapping[Literal["bf16", "fp32"], Rate] = field(default_factory=dict)  # dtype -> sustained rate
    attention_flops_per_s: Rate | None = None  # of deterministic attention's forward on the GPU, bf16
    hbm_Bps: Rate | None = None  # bytes read + bytes written
    dma_slowdown: Mapping[str, float] = field(default_factory=dict)  # kernel -> its time during copies / alone
    disk: Disk | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    format: Literal[2] = FORMAT


_ADAPTER = TypeAdapter(Measured)


def cache_file(host: Host, gpu: Gpu | None) -> Path:
    """Where the figures of this machine are kept: one folder for each set of host facts, as homes are shared."""
    steady = replace(host, ram_available_bytes=0, locked_limit_bytes=None, load=0.0)
    facts = [steady.__dict__, None if gpu is None else [gpu.name, gpu.hbm_total_bytes, gpu.driver]]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "megatrain" / "machines" / key / "machine.json"


def to_json(measured: Measured) -> str:
    """The figures as one JSON object."""
    return _ADAPTER.dump_json(measured, indent=1).decode()


def save_measured(measured: Measured, path: Path) -> None:
    """Writes the file in one piece; only its owner may read it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(to_json(measured))
    temporary.replace(path)


def load_measured(path: Path) -> Measured | None:
    """The figures of a file; None if it is missing, damaged or of another format: then measure again."""
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None

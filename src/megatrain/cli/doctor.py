"""`megatrain doctor`: takes every measurement in turn, keeps the figures, prints the checks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from subprocess import SubprocessError
from typing import TypeVar

import numpy as np
import torch

from megatrain.errors import ConfigError
from megatrain.hardware import checks as doctor_checks
from megatrain.hardware.checks import Check
from megatrain.hardware.disk import measure_disk
from megatrain.hardware.dram import copy_Bps, update_params_per_s
from megatrain.hardware.gpu import ask_smi, measure_hbm_Bps, measure_link, measure_pin, measure_slowdown
from megatrain.hardware.host import describe_host, versions
from megatrain.hardware.measured import Measured, cache_file, load_measured, save_measured, to_json
from megatrain.hardware.probe import TorchGpu, describe_gpu, sustained_matmul_flops_per_s
from megatrain.memory.limits import available_ram_bytes, cgroup_limit_bytes, locked_memory_limit_bytes
from megatrain.optim import AdamW, scalars, split, update_split
from megatrain.optim.native import isas

RAM_SHARE = 10  # never more than a tenth of the RAM that is available
PARAM_BYTES = 16  # hi 2, lo 2, m, v and grad 4 each
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Of a kernel that asks for more than a device has, say.
TRITON_ERRORS: Sequence[type[Exception]] = [import_module("triton.errors").TritonError] if find_spec("triton") else []
Taken = TypeVar("Taken")
Rate = Callable[[float], float]  # a limit in seconds -> something a second


@dataclass(frozen=True)
class Limits:
    """How much each measurement may take."""

    ram_bytes: int
    ram_s: float
    update_s: float
    pin_bytes: int
    pin_s: float
    matmul_s: Mapping[str, float]  # of each device type, for each dtype
    disk_bytes: int
    disk_s: float


FULL = Limits(4 << 30, 1.5, 2.0, 16 << 30, 8.0, {"cuda": 3.0, "cpu": 0.5}, 2 << 30, 6.0)
QUICK = Limits(256 << 20, 0.2, 0.2, 1 << 30, 1.0, {"cuda": 0.5, "cpu": 0.05}, 64 << 20, 1.0)


class Taker:
    """Takes one measurement after another; what goes wrong is noted under its name, and the others go on."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def take(self, name: str, measure: Callable[[], Taken]) -> Taken | None:
        """The figure, or None."""
        _say(name)
        try:
            return measure()
        except (RuntimeError, OSError, MemoryError, SubprocessError, *TRITON_ERRORS) as error:  # its C compiler, too
            self.failed[name] = _reason(error)
            return None


def doctor(folder: Path, attention_rate: Rate, *, quick: bool, cached: bool, as_json: bool) -> int:
    """Measures this machine, or looks up what was measured; exit code 1 if training will not work here.

    `attention_rate`: operations a second of attention; called where there is a GPU only.
    """
    if folder.is_file():
        raise ConfigError(f"{folder} is a file; give the folder where runs will be written")
    taker = Taker()
    host = describe_host(available_ram_bytes(), cgroup_limit_bytes(), locked_memory_limit_bytes())
    gpu = taker.take("gpu", describe_gpu)
    path = cache_file(host, gpu)
    if cached:
        measured = load_measured(path)
        if measured is None:
            raise ConfigError("--cached: nothing was measured on this machine yet; run `megatrain doctor` without it")
    else:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        smi = ask_smi(None) if gpu is None else None
        start = Measured(now, host, versions(), tuple(isas()), gpu=gpu, driver_without_torch=smi and smi.name)
        fresh = measure(start, folder, QUICK if quick else FULL, taker, attention_rate)
        if not quick:
            taker.take("cache", lambda: save_measured(fresh, path))
        measured = replace(fresh, failed=dict(taker.failed))
    _say("")
    found = doctor_checks.judge(measured)
    if as_json:
        verdict = doctor_checks.worst(found)
        table = {"verdict": verdict, "checks": [check.__dict__ for check in found]}
        print(json.dumps({**table, "measured": json.loads(to_json(measured))}, indent=1, ensure_ascii=False))
    else:
        print("\n".join([*check_lines(found), "", *block_lines(measured, found)]))
    return int(doctor_checks.worst(found) == "FAIL")


def measure(start: Measured, folder: Path, limits: Limits, taker: Taker, attention_rate: Rate) -> Measured:
    """`start` with every figure that could be taken."""
    spare_bytes = min(limits.ram_bytes, start.host.ram_available_bytes // RAM_SHARE)
    disk_bytes = min(limits.disk_bytes, start.host.ram_available_bytes // RAM_SHARE)  # may pass the page cache
    threads = start.host.num_cores
    measured = replace(
        start,
        dram_copy_Bps=taker.take("dram", lambda: copy_Bps(spare_bytes, threads, limits.ram_s)),
        update_params_per_s=taker.take("update", lambda: _update_rate(spare_bytes, threads, limits.update_s)),
        matmul_flops_per_s=taker.take("matmul", lambda: _matmul_rates(start, limits)) or {},
        disk=taker.take(
            "disk",
            lambda: measure_disk(folder, disk_bytes, limits.disk_s, Path("/proc/self/mountinfo").read_text()),
        ),
    )
    if start.gpu is not None:
        measured = taker.take("gpu", lambda: _with_gpu(measured, limits, taker, attention_rate)) or measured
    return replace(measured, failed=dict(taker.failed))


def _with_gpu(measured: Measured, limits: Limits, taker: Taker, attention_rate: Rate) -> Measured:
    cap_bytes = min(limits.pin_bytes, measured.host.ram_available_bytes // RAM_SHARE)
    with TorchGpu() as device:
        pin = taker.take("pin limit", lambda: measure_pin(device, cap_bytes, limits.pin_s))
        link = taker.take("pcie", lambda: measure_link(device))
        hbm_Bps = taker.take("hbm rate", lambda: measure_hbm_Bps(device))
        slowdown = {} if link is None else taker.take("dma slowdown", lambda: measure_slowdown(device, link))
    attention_flops_per_s = taker.take("attention", lambda: attention_rate(limits.matmul_s["cuda"]))
    return replace(
        measured, pin=pin, link=link, hbm_Bps=hbm_Bps, attention_flops_per_s=attention_flops_per_s,
        dma_slowdown=slowdown or {},
    )  # fmt: skip


def _matmul_rates(start: Measured, limits: Limits) -> dict[str, float]:
    device = torch.device("cpu" if start.gpu is None else "cuda")
    limit_s = limits.matmul_s[device.type]
    return {name: sustained_matmul_flops_per_s(device, dtype, limit_s) for name, dtype in DTYPES.items()}


def _update_rate(num_bytes: int, threads: int, limit_s: float) -> float:
    """Of the optimizer's own kernel, over ordinary numbers."""
    num_params = num_bytes // PARAM_BYTES
    normal = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
    tile_hi, tile_lo = split(normal)
    hi, lo = np.resize(tile_hi, num_params), np.resize(tile_lo, num_params)
    m, grad, v = np.resize(normal, num_params), np.resize(normal, num_params), np.resize(normal**2, num_params)
    step = scalars(AdamW(learning_rate=1e-5, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01), 10, 1.0)

    def update(span: slice) -> None:
        update_split(hi[span], lo[span], m[span], v[span], grad[span], step, decay=True, threads=threads)

    return update_params_per_s(update, num_params, limit_s)


def check_lines(found: Sequence[Check]) -> list[str]:
    """One line a check: verdict, name, what was found, the remedy."""
    return [
        f"{check.verdict:<4}  {check.name:<12}  {check.found}" + (f" -> {check.remedy}" if check.remedy else "")
        for check in found
    ]


def block_lines(measured: Measured, found: Sequence[Check]) -> list[str]:
    """What to paste into an issue: no path, no name of a user or a machine."""
    return [
        "To paste into an issue:",
        "```",
        f"megatrain doctor, {measured.measured_at}",
        *(f"{check.verdict:<4} {check.name}: {check.found}" for check in found),
        "```",
    ]


def _reason(error: Exception) -> str:
    """The error in one line, without the user's paths."""
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
    return f"{type(error).__name__}: " + re.sub(r"(?<![\w.])[~.]*/[^\s'\",;:]+", "<path>", said)


def _say(name: str) -> None:
    """What goes on now, on stderr: one line that replaces itself on a terminal; an empty name ends it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{name and f'measuring: {name} …'}", end="", file=sys.stderr, flush=True)
    elif name:
        print(f"measuring: {name}", file=sys.stderr, flush=True)

"""What is measured of a GPU, with one of our own; the real one where there is one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.doctor import LIMIT_S, examined
from megatrain.hardware import gpu
from megatrain.hardware.gpu import (
    LARGE_BYTES,
    MIB,
    Direction,
    Kernel,
    ask_smi,
    measure_hbm_Bps,
    measure_link,
    measure_pin,
    measure_slowdown,
    parse_smi,
)
from megatrain.hardware.measured import Link

GIB = 1 << 30


class FakeDevice:
    """Pins up to `limit_bytes`; copies at `rates`, 10 % slower both ways; kernels take 10 ms, `slow` × under copies."""

    def __init__(self, limit_bytes: int = 1 << 60, slow: float = 1.25) -> None:
        self.limit_bytes, self.slow = limit_bytes, slow
        self.rates: dict[Direction, float] = {"h2d": 50e9, "d2h": 40e9}
        self.pinned: list[int] = []
        self.given_back = 0
        self.asked: list[tuple[Kernel, int, int]] = []

    def pin(self, num_bytes: int) -> int:
        if sum(self.pinned) + num_bytes > self.limit_bytes:
            return 2
        self.pinned.append(num_bytes)
        return 0

    def unpin_all(self) -> None:
        self.given_back = sum(self.pinned)

    def copy_s(self, directions: tuple[Direction, ...], num_bytes: int, repeats: int) -> dict[Direction, float]:
        share = 0.9 if len(directions) == 2 else 1.0
        start_s = 10e-6
        return {d: repeats * (start_s + num_bytes / self.rates[d] / share) for d in directions}

    def kernel_s(self, kernel: Kernel, repeats: int, copies: int) -> float:
        self.asked.append((kernel, repeats, copies))
        return repeats * 0.010 * (self.slow if copies else 1.0)


def test_pins_grow_to_the_cap_and_are_given_back() -> None:
    device = FakeDevice()
    pin = measure_pin(device, 4 * GIB, 60.0)
    assert [size >> 20 for size in device.pinned] == [64, 128, 256, 512, 1024, 1024, 1024]
    assert (pin.pinned_bytes, pin.tried_bytes, pin.status) == (4032 * MIB, 4032 * MIB, 0)
    assert device.given_back == pin.pinned_bytes


def test_a_refused_pin_says_what_was_reached() -> None:
    device = FakeDevice(limit_bytes=500 * MIB)
    pin = measure_pin(device, 4 * GIB, 60.0)
    assert (pin.pinned_bytes, pin.tried_bytes, pin.status) == (448 * MIB, 960 * MIB, 2)
    assert device.given_back == 448 * MIB


def test_pins_stop_when_the_time_is_over() -> None:
    assert measure_pin(FakeDevice(), 4 * GIB, 0.0).pinned_bytes == 0


def test_a_pin_that_raises_gives_all_back() -> None:
    class Breaks(FakeDevice):
        def pin(self, num_bytes: int) -> int:
            if self.pinned:
                raise RuntimeError("CUDA error: unknown")
            return super().pin(num_bytes)

    device = Breaks()
    with pytest.raises(RuntimeError):
        measure_pin(device, 4 * GIB, 60.0)
    assert device.given_back == 64 * MIB


def test_link_rates_each_way_both_ways_and_by_size() -> None:
    link = measure_link(FakeDevice())
    assert link.h2d_Bps == pytest.approx(50e9, rel=0.01)
    assert link.d2h_Bps == pytest.approx(40e9, rel=0.01)
    assert link.both_h2d_Bps == pytest.approx(45e9, rel=0.01)
    assert link.both_d2h_Bps == pytest.approx(36e9, rel=0.01)
    sizes, rates = zip(*link.small, strict=True)
    assert [size >> 20 for size in sizes] == [1, 4, 16, 64, 256]
    assert rates[0] == pytest.approx(MIB / (10e-6 + MIB / 50e9))
    assert list(rates) == sorted(rates)


def test_slowdown_compares_the_same_kernels_with_copies_that_outlast_them() -> None:
    device = FakeDevice(slow=1.25)
    link = Link(50e9, 40e9, 45e9, 36e9, ())
    assert measure_slowdown(device, link) == pytest.approx({"matmul": 1.25, "add": 1.25})
    for kernel in ("matmul", "add"):
        alone, under_copies = [asked for asked in device.asked if asked[0] == kernel][-2:]
        assert alone == (kernel, 30, 0)
        assert under_copies[1] == 30
        assert under_copies[2] * LARGE_BYTES / 45e9 > 1.25 * 0.3


def test_hbm_rate_counts_what_a_sum_reads_and_writes() -> None:
    device = FakeDevice()
    assert measure_hbm_Bps(device) == pytest.approx(3 * LARGE_BYTES / device.kernel_s("add", 1, 0))
    assert device.asked[-2] == ("add", 30, 0)


SMI = "NVIDIA H200, 565.57.01, Enabled, 8, 16\nNVIDIA H200, 565.57.01, Enabled, 16, 16\n"


def test_nvidia_smi_is_read() -> None:
    assert parse_smi(SMI) == ("NVIDIA H200", "565.57.01", True, 8, 16)
    assert parse_smi("GeForce, 550.1, [N/A], [N/A], 16") == ("GeForce", "550.1", None, None, 16)
    assert parse_smi("GeForce, 550.1, Disabled, 16, 16") == ("GeForce", "550.1", False, 16, 16)
    assert parse_smi("No devices were found\n") is None
    assert parse_smi("") is None


def test_nvidia_smi_may_be_missing_or_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def answers(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, SMI, "")

    monkeypatch.setattr(gpu.subprocess, "run", answers)
    assert ask_smi("1-2") == parse_smi(SMI)
    assert ask_smi(None) == parse_smi(SMI)
    assert "--id=GPU-1-2" in asked[0]
    assert not any("--id" in word for word in asked[1])
    for error in (
        FileNotFoundError(),
        subprocess.TimeoutExpired("nvidia-smi", 10),
        subprocess.CalledProcessError(9, ""),
    ):

        def fails(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr(gpu.subprocess, "run", fails)
        assert ask_smi(None) is None


@pytest.mark.gpu
def test_the_real_gpu() -> None:
    import torch  # noqa: PLC0415 - only where there is a GPU

    from megatrain.hardware.probe import TorchGpu, describe_gpu, sustained_matmul_flops_per_s  # noqa: PLC0415

    found = describe_gpu()
    assert found is not None
    assert 0 < found.hbm_free_bytes <= found.hbm_total_bytes
    with TorchGpu() as device:
        pin = measure_pin(device, 1 * GIB, 5.0)
        assert pin.pinned_bytes == 960 * MIB
        link = measure_link(device)
        assert 1e9 < link.both_h2d_Bps < 1.1 * link.h2d_Bps < 1e12
        assert 1e9 < link.both_d2h_Bps < 1.1 * link.d2h_Bps < 1e12
        assert 1e11 < measure_hbm_Bps(device) < 1e14
        slowdown = measure_slowdown(device, link)
        assert all(0.9 < ratio < 3 for ratio in slowdown.values())
    assert torch.cuda.memory_allocated() <= 64 * MIB  # all given back, but for the workspace that cuBLAS keeps
    cuda = torch.device("cuda")
    bf16 = sustained_matmul_flops_per_s(cuda, torch.bfloat16, 0.5)
    assert bf16 > sustained_matmul_flops_per_s(cuda, torch.float32, 0.5) > 1e12


@pytest.mark.gpu
def test_a_whole_examination_takes_less_than_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    took_s, found = examined(tmp_path)
    print(f"doctor: {took_s:.1f} s")
    assert took_s < LIMIT_S
    measured: Any = found["measured"]
    assert measured["failed"] == {}
    assert all(measured[name] for name in ("pin", "link", "hbm_Bps", "attention_flops_per_s", "dma_slowdown", "disk"))

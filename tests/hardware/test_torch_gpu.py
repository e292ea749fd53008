"""TorchGpu on a stand-in for CUDA: what it registers, copies and gives back. The real one: test_gpu.py, marked gpu."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatrain.hardware import probe
from megatrain.hardware.gpu import MIB
from megatrain.hardware.probe import TorchGpu, describe_gpu, sustained_matmul_flops_per_s, sustained_per_s


class Runtime:
    """cudart: takes registrations of up to `limit_bytes` in all."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes, self.held, self.refused = limit_bytes, dict[int, int](), 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % 4096 == 0
        assert flags == 0
        if sum(self.held.values()) + num_bytes > self.limit_bytes:
            self.refused += 1
            return 2
        self.held[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.held[address]
        return 0


class Event:
    """Counts the copies and kernels issued before it as seconds."""

    issued = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.issued

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    runtime = Runtime(limit_bytes=8 * MIB)
    real_copy, real_mm = torch.Tensor.copy_, torch.mm

    def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        assert non_blocking
        Event.issued += 1
        return real_copy(target, source)

    def mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        Event.issued += 1
        return real_mm(*args, **kwargs)

    monkeypatch.setattr(probe, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(probe, "LARGE_BYTES", 2 * MIB)
    monkeypatch.setitem(probe.MATMUL_SIZE, "cuda", 8)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    monkeypatch.setattr(torch, "mm", mm)
    for name, stand_in in {
        "cudart": lambda: runtime,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": object,
        "Event": Event,
        "stream": lambda _: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    yield runtime
    assert runtime.held == {}


def test_pins_are_held_until_given_back(runtime: Runtime) -> None:
    with TorchGpu() as device:
        assert [device.pin(4 * MIB), device.pin(4 * MIB), device.pin(MIB)] == [0, 0, 2]
        assert sorted(runtime.held.values()) == [4 * MIB, 4 * MIB]
        device.unpin_all()
        assert runtime.held == {}
        assert device.pin(MIB) == 0


def test_copies_go_the_way_they_are_asked_to(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[bool, bool, int]] = []
    issue = torch.Tensor.copy_

    def spy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        pinned = [tensor.data_ptr() in runtime.held for tensor in (target, source)]
        moved.append((pinned[0], pinned[1], target.numel()))
        return issue(target, source, non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", spy)
    with TorchGpu() as device:
        assert device.copy_s(("h2d",), MIB, 3) == {"h2d": 3.0}
        assert moved == [(False, True, MIB)] * 3
        moved.clear()
        assert device.copy_s(("d2h",), MIB // 2, 2) == {"d2h": 2.0}
        assert moved == [(True, False, MIB // 2)] * 2
        assert device.copy_s(("h2d", "d2h"), MIB, 1) == {"h2d": 1.0, "d2h": 1.0}
        assert len(runtime.held) == 2


@pytest.mark.usefixtures("runtime")
def test_kernels_are_timed_without_the_copies() -> None:
    with TorchGpu() as device:
        before = Event.issued
        assert device.kernel_s("matmul", 5, 0) == 5.0
        assert Event.issued == before + 5
        assert device.kernel_s("matmul", 5, 3) == 5.0
        assert Event.issued == before + 5 + 5 + 2 * 3
        assert device.kernel_s("add", 2, 0) == 0.0  # no mm among them


def test_copies_need_pinned_memory(runtime: Runtime) -> None:
    runtime.limit_bytes = 3 * MIB
    with TorchGpu() as device, pytest.raises(RuntimeError, match="refused with CUDA error 2"):
        device.copy_s(("h2d",), MIB, 1)


def test_the_rate_is_that_of_the_second_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe.MATMUL_SIZE, "cpu", 8)
    looks = iter([0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0])  # products of 0.1 s, then of 0.2 s
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(looks))
    rate = sustained_matmul_flops_per_s(torch.device("cpu"), torch.float32, 1.0)
    assert rate == pytest.approx(2 * 8**3 / 0.2)


def test_what_the_first_time_compiles_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(probe.time, "perf_counter", lambda: now_s[0])

    def work() -> None:
        now_s[0] += 0.01 if now_s[0] else 9.0  # much longer than all of the measurement

    assert sustained_per_s(work, torch.device("cpu"), 4, 1.0) == pytest.approx(1 / 0.01)


def test_one_slow_product_is_a_rate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe.MATMUL_SIZE, "cpu", 8)
    looks = iter([0.0, 7.0])
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(looks))
    assert sustained_matmul_flops_per_s(torch.device("cpu"), torch.bfloat16, 1.0) == pytest.approx(2 * 8**3 / 7)


def test_the_product_is_of_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe.MATMUL_SIZE, "cpu", 16)
    spread: list[float] = []
    monkeypatch.setattr(torch, "mm", lambda a, b, **_: spread.extend([a.float().std().item(), b.float().std().item()]))
    sustained_matmul_flops_per_s(torch.device("cpu"), torch.float32, 1e-9)
    assert spread
    assert min(spread) > 0.5


def test_no_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert describe_gpu() is None

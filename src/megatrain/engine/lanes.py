"""Lanes: what runs ops in order. A host lane runs them on its thread; a stream lane queues them on a CUDA stream.

A mark is a moment on a lane: a `perf_counter` time on a host lane (what was called has then happened), a CUDA event on
a stream lane (it will have happened when the event fires).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from megatrain.schedule.ops import Lane

Mark = float | torch.cuda.Event


class LaneDevice(Protocol):
    """Where one lane's ops happen."""

    def context(self) -> AbstractContextManager[object]: ...

    def mark(self) -> Mark: ...

    def wait(self, mark: Mark) -> None: ...

    def drain(self) -> None: ...


class HostLane:
    """Ops happen on the lane's own thread; waiting for a stream's mark blocks this thread only."""

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> Mark:
        return time.perf_counter()

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, torch.cuda.Event):
            mark.synchronize()

    def drain(self) -> None:
        return None


class StreamLane:
    """Ops are queued on a CUDA stream; a wait for another stream's mark is queued too and blocks nobody."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def context(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def mark(self) -> Mark:
        # blocking: a host lane that waits for this event must sleep, not spin on a core the optimizer needs
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self.stream)
        return event

    def wait(self, mark: Mark) -> None:
        if isinstance(mark, torch.cuda.Event):
            self.stream.wait_event(mark)

    def drain(self) -> None:
        self.stream.synchronize()


class SlowLane:
    """A lane that calls `first` before each mark: before an op starts, and before it counts as done."""

    def __init__(self, inner: LaneDevice, first: Callable[[], None]) -> None:
        self.inner = inner
        self.first = first

    def context(self) -> AbstractContextManager[object]:
        return self.inner.context()

    def mark(self) -> Mark:
        self.first()
        return self.inner.mark()

    def wait(self, mark: Mark) -> None:
        self.inner.wait(mark)

    def drain(self) -> None:
        self.inner.drain()


def drained_lanes(device: torch.device) -> Mapping[Lane, LaneDevice]:
    """The lanes of `device`, each of which has drained before an op counts as done: an error comes at its own op."""
    return {lane: SlowLane(inner, inner.drain) for lane, inner in lane_devices(device).items()}


def lane_devices(device: torch.device) -> Mapping[Lane, LaneDevice]:
    """The lanes of `device`: host threads on the CPU; three CUDA streams and three host threads on a GPU."""
    if device.type != "cuda":
        return {lane: HostLane() for lane in Lane}
    streams = (Lane.COMPUTE, Lane.H2D, Lane.D2H)
    # compute first in line for the SMs; copies use the copy engines either way
    priority = {Lane.COMPUTE: -1, Lane.H2D: 0, Lane.D2H: 0}
    return {
        lane: StreamLane(torch.cuda.Stream(device, priority=priority[lane])) if lane in streams else HostLane()
        for lane in Lane
    }


def take_workspaces(compute: LaneDevice, device: torch.device) -> None:
    """Let the framework take, for good, what its matrix products work in: 32 MiB of its pool for this thread, as much
    for that of backward passes, 1 MiB for products with a bias. Taken at their first products, amid what comes and
    goes, those left holes: 0.23 GB of 24 GiB (Llama 3 8B)."""
    if device.type == "cuda":
        with compute.context(), torch.enable_grad():
            square = torch.ones(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
            product = torch.nn.functional.linear(square, square, square[0])
            (product @ square).sum().backward()

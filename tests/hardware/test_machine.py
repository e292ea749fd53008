"""What the machine says of itself, read right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.errors import ConfigError
from megatrain.hardware.probe import disk_free_bytes, isa, probe, processor_name

CPUINFO = "processor\t: 0\nmodel name\t: A Processor 9000\nflags\t\t: fpu sse2 avx avx2 fma\n"


def test_processor_and_widest_vector_unit() -> None:
    assert processor_name(CPUINFO) == "A Processor 9000"
    assert isa(CPUINFO).endswith(" avx2")
    assert isa(CPUINFO.replace("avx2", "avx2 avx512f")).endswith(" avx512f")
    assert " " not in isa("Features\t: fp\n")


def test_this_machine(tmp_path: Path) -> None:
    machine = probe("cpu", tmp_path / "not" / "there", 5 << 30)
    assert (machine.device, machine.hbm_total_bytes, machine.ram_available_bytes) == ("cpu", 0, 5 << 30)
    assert machine.ram_total_bytes > 1 << 30
    assert machine.num_cores >= 1
    assert machine.disk_free_bytes == disk_free_bytes(tmp_path) > 0


def test_a_gpu_that_is_not_there_is_no_silent_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is cuda, but torch sees no GPU"):
        probe("cuda", tmp_path, 0)
    assert probe("auto", tmp_path, 0).device == "cpu"

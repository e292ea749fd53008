"""`megatrain doctor`: really run here with small sizes, and with a GPU of our own."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import torch
from typer.testing import CliRunner

from megatrain.cli import doctor, doctor_attention
from megatrain.cli.main import app
from megatrain.errors import ConfigError
from megatrain.hardware.gpu import Smi
from megatrain.hardware.measured import Gpu
from megatrain.memory.limits import cgroup_limit_bytes
from tests.hardware.test_gpu import FakeDevice

GIB = 1 << 30
MIB = 1 << 20
TINY = doctor.Limits(32 * MIB, 0.02, 0.02, 300 * MIB, 1.0, {"cuda": 0.01, "cpu": 0.01}, 16 * MIB, 0.5)
GPU = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, "565.57.01", True, 16, 16)


class Device(FakeDevice):
    """The fake, used in a `with` as TorchGpu is."""

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpin_all()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "FULL", TINY)
    monkeypatch.setattr(doctor, "QUICK", TINY)
    monkeypatch.setattr(doctor, "describe_gpu", lambda: None)
    monkeypatch.setattr(doctor, "ask_smi", lambda _: None)
    monkeypatch.setattr(
        doctor, "sustained_matmul_flops_per_s", lambda _, dtype, *__: {2: 9e12, 4: 1e12}[dtype.itemsize]
    )


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["doctor", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def with_gpu(monkeypatch: pytest.MonkeyPatch, device: Device, gpu: Gpu = GPU) -> None:
    monkeypatch.setattr(doctor, "describe_gpu", lambda: gpu)
    monkeypatch.setattr(doctor, "TorchGpu", lambda: device)
    monkeypatch.setattr(doctor_attention, "attention", lambda *_, **__: None)
    monkeypatch.setattr(doctor_attention, "sustained_per_s", lambda work, *_: work() or 100.0)
    monkeypatch.setattr(doctor_attention, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(doctor_attention, "ATTENTION", (8, 4, 2, 16))


def test_this_machine(tmp_path: Path) -> None:
    code, out, err = run(str(tmp_path / "runs"))
    assert code == 0
    lines = out.partition("\n\n")[0].splitlines()
    assert {line[:4].strip() for line in lines} <= {"OK", "WARN"}
    names = [line[6:18].strip() for line in lines]
    assert names[:3] == ["gpu", "ram", "cpu"]
    assert {"dram", "update", "matmul", "disk space", "versions"} <= set(names)
    assert all(("->" in line) == line.startswith(("WARN", "FAIL")) for line in lines)
    assert err.splitlines() == [f"measuring: {name}" for name in ("gpu", "dram", "update", "matmul", "disk", "cache")]
    assert not (tmp_path / "runs").exists()


def test_no_model_code_is_loaded_before_a_gpu_is_there() -> None:
    """transformers and the compiler: 3 s."""
    code = "import sys\nfrom megatrain.cli import doctor\nsys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_block_names_no_user_and_no_place(tmp_path: Path) -> None:
    _, out, _ = run(str(tmp_path))
    block = out.split("```")[1]
    for secret in (str(tmp_path), str(Path.home()), os.uname().nodename, str(Path.cwd())):
        assert secret not in block
    assert "->" not in block
    assert "megatrain" in block


def test_json_is_one_object_with_every_figure(tmp_path: Path) -> None:
    code, out, _ = run(str(tmp_path), "--json")
    table = json.loads(out)
    assert code == 0
    assert table["verdict"] in ("OK", "WARN")
    assert {check["name"] for check in table["checks"]} >= {"gpu", "ram", "disk space"}
    assert table["measured"]["dram_copy_Bps"] > 0
    assert table["measured"]["update_params_per_s"] > 0
    assert str(tmp_path) not in out


def test_cached_shows_the_last_figures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nothing was measured"):
        run("--cached")
    run(str(tmp_path), "--quick")
    with pytest.raises(ConfigError, match="nothing was measured"):
        run("--cached")
    first = json.loads(run(str(tmp_path), "--json")[1])
    monkeypatch.setattr(doctor, "measure", None)
    assert json.loads(run("--cached", "--json")[1]) == first


def test_a_gpu_is_measured_and_its_memory_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    with_gpu(monkeypatch, device)
    code, out, _ = run(str(tmp_path), "--json")
    table = json.loads(out)
    verdicts = {check["name"]: check["verdict"] for check in table["checks"]}
    for name in ("gpu", "hbm", "pin limit", "pcie", "small copies", "matmul", "attention", "hbm rate", "dma slowdown"):
        assert verdicts[name] == "OK", name
    assert code == 0
    assert device.given_back == sum(device.pinned) == 192 * MIB  # 64 + 128, below the cap of 300
    assert table["measured"]["matmul_flops_per_s"] == {"bf16": 9e12, "fp32": 1e12}
    pairs = 8 * 9 // 2  # of causal attention over 8 tokens; each: 2 multiply-adds in 4 heads of 16 channels
    assert table["measured"]["attention_flops_per_s"] == 100 * pairs * 4 * 16 * 2 * 2


def test_pins_take_a_tenth_of_the_ram_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    with_gpu(monkeypatch, device)
    monkeypatch.setattr(doctor, "available_ram_bytes", lambda: 1 * GIB)
    code, _, _ = run(str(tmp_path))
    assert sum(device.pinned) <= GIB / 10
    assert code == 1  # a machine with 1 GiB of RAM


def test_a_broken_link_fails_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Device):
        def copy_s(self, *_: object) -> dict:
            raise RuntimeError("CUDA error: no kernel image in /home/someone/lib/libcuda.so for the device\nmore")

    with_gpu(monkeypatch, Broken())
    code, out, _ = run(str(tmp_path))
    assert code == 1
    assert "could not be measured: RuntimeError: CUDA error: no kernel image in <path> for the device ->" in out
    assert "someone" not in out
    assert "OK    pin limit" in out
    assert "dma slowdown" not in out
    assert "disk rate" in out or "disk space" in out


def test_a_gpu_that_cannot_be_asked_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Gpu:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(doctor, "describe_gpu", broken)
    code, out, _ = run(str(tmp_path))
    assert code == 1
    assert "FAIL  gpu           could not be measured: RuntimeError: driver too old" in out


def test_a_gpu_lost_on_the_way_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Device):
        def __exit__(self, *_: object) -> None:
            raise RuntimeError("CUDA error: device lost")

    with_gpu(monkeypatch, Lost())
    code, out, _ = run(str(tmp_path))
    assert code == 1
    assert "FAIL  gpu           could not be measured: RuntimeError: CUDA error: device lost" in out


class NoRoom(Exception):
    """As Triton's own: no RuntimeError."""


@pytest.mark.parametrize("error", [NoRoom("out of resource: shared memory"), CalledProcessError(1, "/usr/bin/gcc")])
def test_a_kernel_that_cannot_be_made_here_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    with_gpu(monkeypatch, Device())
    monkeypatch.setattr(doctor_attention, "attention", broken)
    monkeypatch.setattr(doctor, "TRITON_ERRORS", (NoRoom,))
    code, out, _ = run(str(tmp_path))
    assert code == 1
    assert f"FAIL  attention     could not be measured: {type(error).__name__}: " in out
    assert "/usr/bin" not in out
    assert "OK    pcie" in out


def test_a_folder_that_takes_no_files_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(folder: Path, *_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(folder / "x"))

    monkeypatch.setattr(doctor, "measure_disk", read_only)
    code, out, _ = run(str(tmp_path))
    assert code == 1
    assert "FAIL  disk          could not be measured: OSError: Read-only file system ->" in out
    assert str(tmp_path) not in out


def test_figures_that_cannot_be_kept_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, out, _ = run(str(tmp_path))
    assert code == 0
    assert "WARN  cache         the figures could not be kept" in out


def test_a_gpu_without_the_right_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ask_smi", lambda _: Smi("NVIDIA H200", "565.57.01", None, None, None))
    code, out, _ = run(str(tmp_path))
    assert code == 1
    assert "FAIL  gpu           NVIDIA H200 is here, but torch cannot use it" in out


def test_measurements_stay_below_a_tenth_of_the_ram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, int] = {}

    def note(name: str, num_bytes: int) -> float:
        asked[name] = num_bytes
        return 1e12

    monkeypatch.setattr(doctor, "FULL", replace(TINY, ram_bytes=4 * GIB, disk_bytes=4 * GIB))
    monkeypatch.setattr(doctor, "available_ram_bytes", lambda: 20 * GIB)
    monkeypatch.setattr(doctor, "copy_Bps", lambda num_bytes, *_: note("dram", num_bytes))
    monkeypatch.setattr(doctor, "_update_rate", lambda num_bytes, *_: note("update", num_bytes))
    monkeypatch.setattr(doctor, "measure_disk", lambda _, cap, *__: note("disk", cap) and None)
    run(str(tmp_path))
    assert asked == {"dram": 2 * GIB, "update": 2 * GIB, "disk": 2 * GIB}


def test_one_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    taker = doctor.Taker()
    assert taker.take("disk", lambda: 5) == 5
    doctor._say("")
    assert shown.getvalue() == "\r\x1b[Kmeasuring: disk …\r\x1b[K"


def test_the_least_cgroup_limit_of_all_ancestors(tmp_path: Path) -> None:
    mount = tmp_path / "cg"
    for folder, limit in ((mount, None), (mount / "job", 8 * GIB), (mount / "job" / "step", "max")):
        folder.mkdir()
        if limit is not None:
            (folder / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/job/step\n")
    (tmp_path / "self/mountinfo").write_text(f"30 22 0:26 / {mount} rw - cgroup2 cgroup2 rw\n")
    assert cgroup_limit_bytes(tmp_path) == 8 * GIB
    (mount / "job/step/memory.max").write_text(f"{3 * GIB}\n")
    assert cgroup_limit_bytes(tmp_path) == 3 * GIB
    for folder in (mount / "job", mount / "job" / "step"):
        (folder / "memory.max").write_text("max\n")
    assert cgroup_limit_bytes(tmp_path) is None


def test_the_update_is_the_optimizers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(doctor, "update_split", lambda hi, *_, **__: sizes.append(hi.size))
    monkeypatch.setattr(doctor, "update_params_per_s", lambda update, n, _: update(slice(3, n)) or n)
    assert doctor._update_rate(16 * 100_000, 1, 0.1) == 100_000
    assert sizes == [99_997]


def test_the_device_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices: list[torch.device] = []

    def rate(device: torch.device, *_: object) -> float:
        devices.append(device)
        return 1e12

    monkeypatch.setattr(doctor, "sustained_matmul_flops_per_s", rate)
    run(str(tmp_path))
    with_gpu(monkeypatch, Device())
    run(str(tmp_path))
    assert [device.type for device in devices] == ["cpu", "cpu", "cuda", "cuda"]

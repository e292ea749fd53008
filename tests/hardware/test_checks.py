"""Every verdict of the doctor, each from a good machine with one thing wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.hardware.checks import Check, judge, worst
from megatrain.hardware.measured import Disk, Gpu, Host, Link, Measured, Pin

GIB = 1 << 30
HOST = Host("A Processor 9000", "x86_64 avx2", 16, 1, 128 * GIB, 120 * GIB, None, None, 0.3)
GPU = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, "565.57.01", True, 16, 16)
LINK = Link(55e9, 55e9, 49e9, 49e9, ((1 << 20, 46e9), (256 << 20, 55e9)))
DISK = Disk("ext4", 900 * GIB, True, 1.7e9, 1.7e9)
GOOD = Measured(
    "2026-01-01T00:00:00+00:00",
    HOST,
    {"torch": "2.11.0", "triton": "3.5.0"},
    ("sse2", "avx2"),
    gpu=GPU,
    pin=Pin(12 * GIB, 12 * GIB, 0),
    link=LINK,
    dram_copy_Bps=93e9,
    update_params_per_s=4e9,
    matmul_flops_per_s={"bf16": 785e12, "fp32": 50e12},
    attention_flops_per_s=480e12,
    hbm_Bps=4.1e12,
    dma_slowdown={"matmul": 1.02, "add": 1.05},
    disk=DISK,
)
ALL = [
    "gpu", "hbm", "ram", "cpu", "native core", "dram", "update", "pin limit", "pcie", "small copies", "matmul",
    "attention", "hbm rate", "dma slowdown", "disk space", "disk rate", "versions",
]  # fmt: skip


def lacking(name: str, **figures: None) -> Measured:
    return replace(GOOD, failed={name: "OSError: no"}, **figures)


def host(**changes: float | str | None) -> Measured:
    return replace(GOOD, host=replace(HOST, **changes))


def disk(**changes: int | str | bool | float) -> Measured:
    return replace(GOOD, disk=replace(DISK, **changes))


def link(**changes: float) -> Measured:
    return replace(GOOD, link=replace(LINK, **changes))


BAD = [
    ("gpu", "WARN", replace(GOOD, gpu=None), "NVIDIA GPU"),
    ("gpu", "FAIL", replace(GOOD, gpu=None, driver_without_torch="NVIDIA H200"), "torch build"),
    ("gpu", "FAIL", lacking("gpu"), "driver"),
    ("gpu", "WARN", replace(GOOD, gpu=replace(GPU, capability=(7, 5))), "precision: fp32"),
    ("hbm", "WARN", replace(GOOD, gpu=replace(GPU, hbm_free_bytes=100 * GIB)), "other programs"),
    ("ram", "FAIL", host(ram_available_bytes=1 * GIB), "more RAM"),
    ("ram", "FAIL", host(ram_available_bytes=1 * GIB, ram_limit_bytes=2 * GIB), "more RAM"),
    ("ram", "WARN", host(ram_available_bytes=8 * GIB), "more RAM"),
    ("ram", "WARN", host(ram_limit_bytes=64 * GIB), "memory limit"),
    ("cpu", "WARN", host(isa="x86_64"), "AVX2"),
    ("cpu", "WARN", host(num_cores=2), "4 cores"),
    ("cpu", "WARN", host(load=9.0), "idle"),
    ("native core", "WARN", replace(GOOD, native_isas=()), "compiler"),
    ("dram", "WARN", replace(GOOD, dram_copy_Bps=5e9), "memory channel"),
    ("dram", "FAIL", lacking("dram", dram_copy_Bps=None), "RAM"),
    ("update", "WARN", replace(GOOD, update_params_per_s=0.05e9), "more cores"),
    ("update", "FAIL", lacking("update", update_params_per_s=None), "reinstall"),
    ("pin limit", "WARN", replace(GOOD, pin=Pin(1 * GIB, 2 * GIB, 2)), "ulimit -l"),
    ("pin limit", "FAIL", lacking("pin limit", pin=None), "ulimit -l"),
    ("pcie", "FAIL", lacking("pcie", link=None), "pin limit"),
    ("pcie", "WARN", replace(GOOD, gpu=replace(GPU, pcie_width=8)), "slot"),
    ("pcie", "WARN", link(h2d_Bps=6e9, both_h2d_Bps=6e9), "PCIe generation"),
    ("pcie", "WARN", link(d2h_Bps=6e9, both_d2h_Bps=6e9), "PCIe generation"),
    ("pcie", "WARN", link(both_d2h_Bps=25e9), "iommu"),
    ("small copies", "WARN", replace(GOOD, link=replace(LINK, small=((1 << 20, 9e9), (1 << 28, 55e9)))), "huge pages"),
    ("matmul", "WARN", replace(GOOD, matmul_flops_per_s={"bf16": 60e12, "fp32": 50e12}), "clocks"),
    ("attention", "FAIL", lacking("attention", attention_flops_per_s=None), "triton"),
    ("hbm rate", "FAIL", lacking("hbm rate", hbm_Bps=None), "HBM"),
    ("matmul", "FAIL", replace(GOOD, matmul_flops_per_s={}, failed={"matmul": "RuntimeError: no"}), "torch build"),
    ("dma slowdown", "WARN", replace(GOOD, dma_slowdown={"matmul": 1.0, "add": 1.9}), "power"),
    ("dma slowdown", "FAIL", replace(GOOD, dma_slowdown={}, failed={"dma slowdown": "RuntimeError: no"}), "HBM"),
    ("disk", "FAIL", lacking("disk", disk=None), "may write"),
    ("disk space", "FAIL", disk(free_bytes=GIB // 2), "free some space"),
    ("disk space", "WARN", disk(free_bytes=20 * GIB), "free some space"),
    ("disk space", "WARN", disk(filesystem="tmpfs"), "RAM"),
    ("disk space", "WARN", disk(filesystem="overlay"), "volume"),
    ("disk space", "WARN", disk(filesystem="nfs4"), "local disk"),
    ("disk space", "WARN", disk(filesystem="fuse.sshfs"), "local disk"),
    ("disk rate", "WARN", disk(direct=False), "without O_DIRECT the disk is slower, and takes RAM"),
    ("disk rate", "WARN", disk(write_Bps=0.1e9), "NVMe"),
    ("versions", "WARN", replace(GOOD, versions={"torch": "2.11.0"}), "triton"),
    ("cache", "WARN", lacking("cache"), "XDG_CACHE_HOME"),
]


def test_a_good_machine_is_all_ok() -> None:
    checks = judge(GOOD)
    assert [check.name for check in checks] == ALL
    assert [check for check in checks if check.verdict != "OK" or check.remedy] == []
    assert worst(checks) == "OK"


@pytest.mark.parametrize(("name", "verdict", "measured", "remedy"), BAD, ids=[f"{b[0]}-{b[3]}" for b in BAD])
def test_one_thing_wrong(name: str, verdict: str, measured: Measured, remedy: str) -> None:
    checks = judge(measured)
    wrong = [check for check in checks if check.verdict != "OK"]
    assert [(check.name, check.verdict) for check in wrong] == [(name, verdict)]
    assert remedy.lower() in wrong[0].remedy.lower()
    assert "\n" not in wrong[0].found + wrong[0].remedy
    assert worst(checks) == verdict


def test_the_gravest_verdict_wins() -> None:
    assert worst((Check("a", "WARN", "", "x"), Check("b", "FAIL", "", "x"), Check("c", "OK", ""))) == "FAIL"


def test_figures_are_shown_with_their_units() -> None:
    found = {check.name: check.found for check in judge(host(ram_limit_bytes=127 * GIB, locked_limit_bytes=8 << 20))}
    assert found["gpu"] == "NVIDIA H200, compute capability 9.0, driver 565.57.01, ECC on"
    assert found["ram"] == "120.0 of 128.0 GiB available, cgroup limit 127.0 GiB; room for 10.7 B parameters"
    assert found["pin limit"] == "12.0 of 12.0 GiB tried were pinned; ulimit -l 0.01 GiB"
    assert found["pcie"] == "to the GPU 55.0, back 55.0, both at once 49.0 + 49.0 GB/s, x16 of x16"
    assert found["small copies"] == "GB/s by size: 1 MiB 46.0, 256 MiB 55.0"
    assert found["update"] == "4.00 Gparam/s: 2.0 s a step for 8 B parameters"
    assert found["disk rate"] == "write 1.70, read 1.70 GB/s, O_DIRECT"


def test_a_share_of_processor_time_is_said() -> None:
    said = [judge(host(num_cores=4, cores_limit=limit)) for limit in (None, 4.0, 3.5)]
    cpu = [check.found for checks in said for check in checks if check.name == "cpu"]
    said_cores = [text.split(", ")[2] for text in cpu]
    assert said_cores == ["4 cores", "4 cores (cgroup limit 4)", "4 cores (cgroup limit 3.5)"]


def test_without_a_gpu_nothing_is_said_of_its_link() -> None:
    bare = replace(GOOD, gpu=None, pin=None, link=None, dma_slowdown={})
    assert [c.name for c in judge(bare)] == [
        name for name in ALL if name not in ("hbm", "pin limit", "pcie", "small copies", "dma slowdown")
    ]

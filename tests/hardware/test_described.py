"""Machines that come described, files of the same form, and the doctor's own file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.errors import ConfigError
from megatrain.hardware import Machine
from megatrain.hardware.described import likely_rates, machine_names, read_machine, to_json
from megatrain.hardware.measured import Disk, Gpu, Host, Link, Measured, save_measured
from megatrain.hardware.rates import (
    ASSUMED,
    ATTENTION_SHARE,
    DRAM_BESIDE_UPDATE,
    HBM_IN_STEP,
    PRODUCTS_IN_STEP,
    rates_of,
)
from megatrain.planner.costs import UPDATE_SHARE

GIB = 1 << 30
HOST = Host("a processor", "x86_64 avx2", 16, 1, 128 * GIB, 100 * GIB, None, None, 0.0)
MEASURED = Measured(
    "2026-01-01T00:00:00+00:00",
    HOST,
    {},
    (),
    gpu=Gpu("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, None, None, None, None),
    link=Link(55e9, 54e9, 49e9, 48e9, ()),
    dram_copy_Bps=186e9,
    update_params_per_s=4.1e9,
    matmul_flops_per_s={"bf16": 659e12, "fp32": 50e12},
    attention_flops_per_s=450e12,
    hbm_Bps=4.33e12,
    disk=Disk("ext4", 1000 * GIB, True, 1.7e9, 1.6e9),
)


def test_the_promised_machines_are_there_and_plausible() -> None:
    names = machine_names()
    assert {"24gb-64gb", "24gb-128gb", "24gb-192gb", "h200-1.5tb", "gh200-480gb", "b200-192gb", "h200-125gb"} <= set(
        names
    )
    for name in names:
        described = read_machine(name)
        machine, rates = described.machine, described.rates
        assert described.about
        assert 0 < machine.hbm_free_bytes <= machine.hbm_total_bytes
        assert 0 < machine.ram_available_bytes <= machine.ram_total_bytes
        assert rates.link_both_Bps <= rates.h2d_Bps + rates.d2h_Bps
        assert UPDATE_SHARE * 28 * rates.update_params_per_s <= rates.dram_Bps, f"{name}: the update needs more"


def test_a_file_of_the_same_form_is_read_back(tmp_path: Path) -> None:
    mine = replace(read_machine("gh200-480gb"), about="mine")
    (tmp_path / "mine.json").write_text(to_json(mine))
    assert read_machine(str(tmp_path / "mine.json")) == mine


def test_the_doctors_file_is_a_machine(tmp_path: Path) -> None:
    save_measured(MEASURED, tmp_path / "machine.json")
    described = read_machine(str(tmp_path / "machine.json"))
    assert described.machine == Machine(
        "cuda", "NVIDIA H200", 140 * GIB, 139 * GIB, 128 * GIB, 100 * GIB, 1000 * GIB, 16, "x86_64 avx2"
    )
    rates = described.rates
    assert (rates.h2d_Bps, rates.d2h_Bps, rates.link_both_Bps) == (55e9, 54e9, 97e9)
    assert rates.matmul_flops_per_s == pytest.approx(785e12, rel=0.01)
    assert (rates.update_params_per_s, rates.dram_Bps) == (4.1e9, 186e9)
    assert (rates.attention_flops_per_s, rates.hbm_Bps) == (450e12, HBM_IN_STEP * 4.33e12)
    assert (rates.disk_write_Bps, rates.disk_read_Bps) == (1.7e9, 1.6e9)


def test_what_the_doctor_could_not_take_is_assumed() -> None:
    bare = replace(
        MEASURED, link=None, dram_copy_Bps=None, update_params_per_s=None, matmul_flops_per_s={}, disk=None,
        attention_flops_per_s=None, hbm_Bps=None,
    )  # fmt: skip
    assert replace(rates_of(bare), source="") == replace(ASSUMED["cuda"], source="")
    shared = rates_of(replace(bare, matmul_flops_per_s={"bf16": 800e12}))
    assert shared.attention_flops_per_s == pytest.approx(ATTENTION_SHARE * PRODUCTS_IN_STEP * 800e12)
    slow = rates_of(replace(bare, dram_copy_Bps=90e9, update_params_per_s=4e9))
    assert slow.dram_Bps == pytest.approx(DRAM_BESIDE_UPDATE * 28 * 4e9), "it carries copies beside the update"
    cpu = rates_of(replace(bare, gpu=None, dram_copy_Bps=80e9, update_params_per_s=2e9))
    assert (cpu.hbm_Bps, cpu.h2d_Bps) == (80e9, 40e9), "on a CPU, slots are host memory"


def test_a_machine_with_a_known_device_is_likely_like_it() -> None:
    known = read_machine("h200-125gb")
    for name in ("h200-125gb", "h200-1.5tb"):
        likely = likely_rates(read_machine(name).machine)
        assert likely.source.startswith(f"those of {name};")
        assert replace(likely, source="") == replace(read_machine(name).rates, source="")
    assert likely_rates(replace(known.machine, device_name="another")) == ASSUMED["cuda"]


def test_a_damaged_file_says_where(tmp_path: Path) -> None:
    text = to_json(read_machine("h200-125gb")).replace('"hbm_Bps"', '"hbm_speed"')
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"rates\.hbm_Bps: "):
        read_machine(str(tmp_path / "bad.json"))

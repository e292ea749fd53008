"""Machines that come described, files of the same form, and the doctor's own file."""

from __future__ import annotations

import json
import re
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


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"hbm_Bps"', '"hbm_speed"', r"rates\.hbm_Bps is missing"),
        ('"about"', '"abuot": "", "about"', "unknown key 'abuot'; Described has about, machine, rates"),
        ('"op_s"', '"op_S": 1, "op_s"', "unknown key 'op_S'; Rates has source, matmul_flops_per_s"),
        ('"op_s"', '"op_s": 1, "op_s"', r"not valid JSON \(key 'op_s' appears twice\)"),
        ('"num_cores": 16', '"num_cores": true', r"machine\.num_cores is True: input should be a valid integer"),
        ('"cuda"', '"rocm"', r"machine\.device is 'rocm': input should be 'cpu' or 'cuda'"),
        ('"scale": {}', '"scale": {"BACKWARD": "2"}', r"rates\.scale\.BACKWARD is '2': input should be a valid number"),
        ('"scale": {}', '"scale": {"BACKWARD": 0}', r"rates\.scale\.BACKWARD is 0"),
        ("{", "", "not valid JSON"),
    ],
)
def test_a_damaged_file_says_where(tmp_path: Path, old: str, new: str, said: str) -> None:
    (tmp_path / "bad.json").write_text(to_json(read_machine("h200-125gb")).replace(old, new, 1))
    with pytest.raises(ConfigError, match=rf"bad.json is no machine file: {said}"):
        read_machine(str(tmp_path / "bad.json"))


FIGURES = [
    f"{part}.{key}"
    for part in ("machine", "rates")
    for key, value in vars(getattr(read_machine("h200-125gb"), part)).items()
    if isinstance(value, int | float)
]


MAY_BE_0 = ("hbm_total_bytes", "hbm_free_bytes", "disk_free_bytes", "disk_read_Bps", "disk_write_Bps")


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_that_no_machine_has_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    """A rate of 0 would be divided by, one below it would make a step shorter the more it has to do."""
    (part, key), file = name.split("."), tmp_path / "bad.json"
    for value in (-1, -0.5, 1e-300, 1e300, 10**30, float("nan"), float("inf"), True, "1", None, 0):
        table = json.loads(to_json(read_machine("h200-125gb")))
        table[part][key] = value
        file.write_text(json.dumps(table))
        if value == 0 and key in MAY_BE_0:
            assert vars(getattr(read_machine(str(file)), part))[key] == 0
            continue
        with pytest.raises(ConfigError, match=rf"bad.json is no machine file: {re.escape(name)} is "):
            read_machine(str(file))


NO_LINK = {"h2d_Bps": 0.0, "d2h_Bps": 1e9, "both_h2d_Bps": 1e9, "both_d2h_Bps": 1e9, "small": []}
GREEN = {"name": "GPU", "capability": [9, 0], "hbm_total_bytes": 2, "hbm_free_bytes": 1, "driver": None, "ecc": None,
         "pcie_width": None, "pcie_width_max": None, "colour": "green"}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hbm_Bps": -1.0}, r"hbm_Bps is -1\.0: give a figure"),
        ({"link": NO_LINK}, r"link\.h2d_Bps is 0\.0: give a figure"),
        ({"dma_slowdown": {"add": float("nan")}}, "dma_slowdown.add is nan: input should be a finite number"),
        ({"matmul_flops_per_s": {"fp8": 1e15}}, "matmul_flops_per_s.fp8 is 'fp8': input should be 'bf16' or 'fp32'"),
        ({"gpu": GREEN}, "unknown key 'colour'; Gpu has name, capability"),
        ({"gpu": {"name": "GPU"}}, "gpu.capability is missing"),
        ({"format": 1}, "format is 1: input should be 2; `megatrain doctor` measures anew"),
    ],
)
def test_the_doctors_file_is_read_as_closely(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = tmp_path / "machine.json"
    save_measured(MEASURED, file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=rf"machine.json is no machine file: {said}"):
        read_machine(str(file))


def test_shipped_machines_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner asks for likely rates at every change that it tries."""
    machine = read_machine("h200-125gb").machine
    first = likely_rates(machine)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    assert likely_rates(machine) == first

"""machine.json: comes back as it was, one for each machine, and a damaged one is measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.hardware.host import count_listed, describe_host, versions
from megatrain.hardware.measured import FORMAT, cache_file, load_measured, save_measured
from tests.hardware.test_checks import GOOD, GPU, HOST


def test_the_file_comes_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "a" / "machine.json"
    for measured in (GOOD, replace(GOOD, gpu=None, link=None, pin=None, disk=None, failed={"disk": "no"})):
        save_measured(measured, path)
        assert load_measured(path) == measured
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["machine.json"]


def test_missing_damaged_and_foreign_files_are_none(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    assert load_measured(path) is None
    save_measured(GOOD, path)
    text = path.read_text()
    for bad in (
        text[:-40],
        text.replace(f'"format": {FORMAT}', '"format": 0'),
        text.replace("93000000000.0", '"fast"'),
        text.replace("93000000000.0", "0.0"),
        text.replace("93000000000.0", "-1.0"),
        "[]",
    ):
        assert bad != text
        path.write_text(bad)
        assert load_measured(path) is None


def test_one_file_for_each_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_file(HOST, GPU)
    assert path.is_relative_to(tmp_path / "megatrain")
    assert path.name == "machine.json"
    assert path == cache_file(
        replace(HOST, ram_available_bytes=5, load=7.0, locked_limit_bytes=1), replace(GPU, hbm_free_bytes=5)
    )
    others = [
        cache_file(replace(HOST, processor="Another"), GPU),
        cache_file(replace(HOST, num_cores=8), GPU),
        cache_file(replace(HOST, ram_limit_bytes=5), GPU),
        cache_file(HOST, replace(GPU, driver="1")),
        cache_file(HOST, None),
    ]
    assert len({path, *others}) == 6
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_file(HOST, GPU).is_relative_to(tmp_path / "home" / ".cache")


def test_the_host_from_its_files(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: A Processor 9000\nflags\t\t: avx2\n")
    nodes = tmp_path / "devices/system/node"
    nodes.mkdir(parents=True)
    (nodes / "online").write_text("0-1\n")
    host = describe_host(3, 2, 1, proc=tmp_path, sys=tmp_path)
    assert (host.processor, host.num_numa_nodes) == ("A Processor 9000", 2)
    assert (host.ram_available_bytes, host.ram_limit_bytes, host.locked_limit_bytes) == (3, 2, 1)
    (nodes / "online").unlink()
    assert describe_host(3, 2, 1, proc=tmp_path, sys=tmp_path).num_numa_nodes == 1


def test_lists_of_the_kernel() -> None:
    assert [count_listed(text) for text in ("0\n", "0-3", "0-1,4,6-7\n")] == [1, 4, 5]


def test_versions_are_those_installed() -> None:
    found = versions()
    assert {"megatrain", "python", "torch", "transformers", "numpy"} <= found.keys()
    assert found["python"].startswith("3.")

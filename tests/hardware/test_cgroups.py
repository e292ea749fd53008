"""How many cores a container's share of processor time is, from made-up files of cgroups v1 and v2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.hardware.cgroups import cgroup_cores, cgroup_folders, usable_cores
from megatrain.hardware.host import describe_host
from megatrain.hardware.probe import probe

V2 = "30 22 0:26 / {mount} rw - cgroup2 cgroup2 rw\n"


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def proc_of(tmp_path: Path, cgroup: str, mounts: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "cpuinfo").write_text("model name\t: A Processor 9000\nflags\t\t: avx2\n")
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mounts.format(mount=tmp_path / "cg"))
    return proc


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content + "\n")


@pytest.mark.parametrize(
    ("quota", "limit", "cores"),
    [
        ("400000 100000", 4.0, 4),
        ("350000 100000", 3.5, 4),
        ("50000 100000", 0.5, 1),
        ("8000000 100000", 80.0, 64),
        ("max 100000", None, 64),
    ],
)
def test_the_share_of_a_container_rounded_up(tmp_path: Path, quota: str, limit: float | None, cores: int) -> None:
    group(tmp_path / "cg", cpu__max=quota)
    proc = proc_of(tmp_path, "0::/\n", V2)
    assert (cgroup_cores(proc), usable_cores(proc)) == (limit, cores)


@pytest.mark.parametrize(("own", "parent", "cores"), [("6", "3", 3), ("2", "3", 2), ("max", "3", 3), ("2", "max", 2)])
def test_the_least_of_all_ancestors(tmp_path: Path, own: str, parent: str, cores: int) -> None:
    group(tmp_path / "cg")  # the root has no file
    group(tmp_path / "cg/job", cpu__max=f"{parent} 1")
    group(tmp_path / "cg/job/step", cpu__max=f"{own} 1")
    assert usable_cores(proc_of(tmp_path, "0::/job/step\n", V2)) == cores


def test_version_1_and_other_controllers(tmp_path: Path) -> None:
    group(tmp_path / "cg/cpu/x", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    group(tmp_path / "cg/cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    group(tmp_path / "cg/memory/x", cpu__cfs_quota_us="100000", cpu__cfs_period_us="100000")  # of another controller
    mounts = "".join(
        f"{i} 1 0:{i} / {{mount}}/{name} rw - cgroup cgroup rw,{options}\n"
        for i, (name, options) in enumerate([("cpu", "cpu,cpuacct"), ("memory", "memory")])
    )
    proc = proc_of(tmp_path, "4:memory:/x\n2:cpu,cpuacct:/x\n0::/\n", mounts)
    assert (cgroup_cores(proc), usable_cores(proc)) == (2.5, 3)
    assert cgroup_folders("memory", proc)[0] == tmp_path / "cg/memory/x"
    (tmp_path / "cg/cpu/x/cpu.cfs_quota_us").write_text("-1\n")
    assert cgroup_cores(proc) is None


def test_a_mount_that_shows_the_own_group_only(tmp_path: Path) -> None:
    group(tmp_path / "cg", cpu__max="2 1")
    mounts = "30 22 0:26 /docker/abc {mount} rw - cgroup2 cgroup2 rw\n"
    assert usable_cores(proc_of(tmp_path, "0::/docker/abc\n", mounts)) == 2


def test_fewer_cores_than_the_share_are_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path / "cg", cpu__max="4 1")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    assert usable_cores(proc_of(tmp_path, "0::/\n", V2)) == 2


def test_machine_and_host_count_them(tmp_path: Path) -> None:
    group(tmp_path / "cg", cpu__max="35 10")
    proc = proc_of(tmp_path, "0::/\n", V2)
    host = describe_host(3, 2, 1, proc=proc, sys=tmp_path)
    assert (host.num_cores, host.cores_limit) == (4, 3.5)
    assert probe("cpu", tmp_path, 0, proc=proc).num_cores == 4


def test_a_kernel_without_cgroups(tmp_path: Path) -> None:
    assert (cgroup_cores(tmp_path), usable_cores(tmp_path)) == (None, 64)

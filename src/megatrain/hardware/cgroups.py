"""The control groups this process is in, and how much processor time they leave it. Linux, v1 and v2. Torch-free."""

from __future__ import annotations

import math
import os
from pathlib import Path

PROC = Path("/proc")


def cgroup_folders(controller: str, proc: Path = PROC) -> list[Path]:
    """Folders of the cgroups with `controller` that this process is in, ours first, each hierarchy up to its mount.

    Inside a container the path in /proc/self/cgroup may lie outside what is mounted: folders that are not there
    are passed over, the mount point itself then is the container's own cgroup.
    """
    listed = proc / "self/cgroup"
    if not listed.is_file():  # a kernel without cgroups
        return []
    paths: dict[str, str] = {}  # "v1" or "v2" -> path in the hierarchy
    for line in listed.read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            paths["v2"] = path
        elif controller in controllers.split(","):
            paths["v1"] = path
    folders: list[Path] = []
    for line in (proc / "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)  # what is mounted may have no name
        version = {"cgroup": "v1", "cgroup2": "v2"}.get(kind)
        if version not in paths or (version == "v1" and controller not in options.split(",")):
            continue
        mount, below = Path(fields[4]), paths[version]
        if fields[3] != "/":  # the mount shows a subtree only
            below = below.removeprefix(fields[3])
        inside = mount / below.lstrip("/")
        folders += [f for f in (inside, *inside.parents) if f.is_relative_to(mount) and f.is_dir()]
    return folders


def cgroup_cores(proc: Path = PROC) -> float | None:
    """The least share of processor time among the cgroups from ours up to the root, in cores (`--cpus 3.5`: 3.5);
    None when none has a limit."""
    quotas = [_quota_cores(folder) for folder in cgroup_folders("cpu", proc)]
    return min((cores for cores in quotas if cores is not None), default=None)


def usable_cores(proc: Path = PROC) -> int:
    """Threads that can run at one time: cores this process may run on, no more than its cgroups give time for."""
    cores, limit = len(os.sched_getaffinity(0)), cgroup_cores(proc)
    return cores if limit is None else min(cores, math.ceil(limit))


def _quota_cores(folder: Path) -> float | None:
    """Microseconds of processor time a period, over the period."""
    v2, v1 = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if v2.is_file():
        quota, period = v2.read_text().split()
    elif v1.is_file():
        quota, period = v1.read_text().strip(), (folder / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)

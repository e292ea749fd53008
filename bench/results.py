"""The result line of every benchmark: what was measured, on what, with which versions, by which command, when."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import secrets
import shlex
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
RUN = secrets.token_hex(4)  # one process, one run: figures with the same one were measured side by side
PACKAGES = ("megatrain", "torch", "transformers", "triton", "numpy")


def machine() -> str:
    """Processor and cores in words that serve as a file name, e.g. `AMD-EPYC-2-cores`; add a GPU's name yourself."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
        model = found.group(1) if found else model
    words = re.sub(r"\(R\)|\(TM\)|@.*$|\b(CPU|Processor)\b", "", model)
    return "-".join([*re.findall(r"[A-Za-z0-9.]+", words), str(len(os.sched_getaffinity(0))), "cores"])


def versions() -> dict[str, str]:
    """The installed packages that a figure depends on, and Python."""
    installed = {dist.metadata["Name"] for dist in metadata.distributions()}
    found = {name: metadata.version(name) for name in PACKAGES if name in installed}
    return {"python": platform.python_version(), **found}


def record(bench: str, fields: Mapping[str, object], *, on: str | None = None, folder: Path = RESULTS) -> str:
    """Append one line to `folder`/<machine>.jsonl and return it.

    `on` names the machine where processor and cores say too little (a GPU).
    """
    name = on or machine()
    line = json.dumps(
        {
            "bench": bench,
            **fields,
            "machine": name,
            "versions": versions(),
            "command": shlex.join(["python", "-m", "bench", *sys.argv[1:]]),
            "run": RUN,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    return line

"""The processor, from the text of /proc/cpuinfo. Torch-free."""

from __future__ import annotations

import platform
import re

ISA_FLAGS = ("avx512f", "avx2", "asimd")  # best first; the native core has a path for each


def processor_name(cpuinfo: str) -> str:
    """The processor's name as the kernel prints it, or the architecture where it prints none."""
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def isa(cpuinfo: str) -> str:
    """Architecture and the widest vector unit: "x86_64 avx2"."""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = found[1].split() if found else []
    best = next((flag for flag in ISA_FLAGS if flag in flags), "")
    return f"{platform.machine()} {best}".strip()

"""The one place that knows whether the C++ core is there."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from types import ModuleType
from typing import NamedTuple

log = logging.getLogger("megatrain")

NUMPY = "numpy"


class Chosen(NamedTuple):
    """The native module and the instruction set it will use."""

    module: ModuleType
    isa: str


@cache
def load() -> ModuleType | None:
    """The native module, or None, said once, when the package was installed without a C++ compiler."""
    if importlib.util.find_spec("megatrain._native") is None:
        log.warning("megatrain was installed without its C++ core: optimizer updates use numpy (same bits, slower)")
        return None
    return importlib.import_module("megatrain._native")


def isas() -> list[str]:
    """Instruction sets the native core can use here, narrowest first; empty without it."""
    module = load()
    return [] if module is None else module.isas()


def choose(isa: str | None) -> Chosen | None:
    """The native module and the instruction set to use, or None for numpy; None asks for the best there is."""
    if isa == NUMPY:
        return None
    module = load()
    if module is None:
        if isa is not None:
            raise ValueError(f"isa is {isa!r}, but the C++ core is not installed; use {NUMPY!r} or leave it out")
        return None
    names = module.isas()
    if isa is not None and isa not in names:
        raise ValueError(f"isa is {isa!r}; this machine has {', '.join([NUMPY, *names])}")
    return Chosen(module, isa or names[-1])

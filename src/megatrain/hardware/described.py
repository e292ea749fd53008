"""Described machines: those that come with MegaTrain under a name, and files of the same form or of the doctor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from megatrain.errors import ConfigError
from megatrain.hardware.machine import Machine
from megatrain.hardware.measured import Measured
from megatrain.hardware.rates import ASSUMED, Rates, machine_of, rates_of
from megatrain.strict_json import typed

FOLDER = Path(__file__).parent / "machines"


@dataclass(frozen=True)
class Described:
    """A machine, its rates, and in words where they come from."""

    about: str
    machine: Machine
    rates: Rates


def machine_names() -> list[str]:
    """The machines that come with MegaTrain."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_machine(name: str) -> Described:
    """The machine of a shipped name, of a file of the same form, or of the machine.json that `doctor` wrote."""
    path = FOLDER / f"{name}.json" if name in machine_names() else Path(name)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--machine: {name!r} is no machine that is shipped and no file that can be read ({error.strerror}); "
            f"give the machine.json of `megatrain doctor`, or one of: {', '.join(machine_names())}"
        ) from None
    where, remedy = f"--machine: {name} is no machine file", f"{FOLDER / 'h200-125gb.json'} is an example"
    if b'"measured_at"' not in content:
        return typed(Described, content, where, ConfigError, remedy)
    measured = typed(Measured, content, where, ConfigError, "`megatrain doctor` measures anew")
    return Described(f"measured {measured.measured_at}", machine_of(measured), rates_of(measured))


@cache  # asked at every change that would make a run fit
def likely_rates(machine: Machine) -> Rates:
    """Rates for a machine of which none were measured: those of the shipped machine with the same device, and of these
    the one with most nearly as much RAM; or modest ones."""
    shipped = {name: read_machine(name) for name in machine_names()}
    alike = [name for name, known in shipped.items() if known.machine.device_name == machine.device_name]
    if not alike:
        return ASSUMED[machine.device]
    nearest = min(alike, key=lambda name: abs(shipped[name].machine.ram_total_bytes - machine.ram_total_bytes))
    return replace(shipped[nearest].rates, source=f"those of {nearest}; `megatrain doctor` measures yours")


def to_json(described: Described) -> str:
    """The file that `read_machine` reads back."""
    return json.dumps(asdict(described), indent=1) + "\n"

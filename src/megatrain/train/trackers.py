"""Trackers: the rows of metrics.jsonl also to TensorBoard, Trackio or Weights & Biases. One thin adapter each.

None of them ever asks a question, and none is needed: each is an extra. Without a key or without a network, Weights &
Biases writes into the run folder, to be synced later.
"""

from __future__ import annotations

import importlib
import netrc
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from megatrain.config import RunConfig
from megatrain.errors import ConfigError

PROJECT = "megatrain"
ID_NAME = ".tracker_id"
MODULES = {"tensorboard": "torch.utils.tensorboard", "trackio": "trackio", "wandb": "wandb"}
WANDB_HOST = "api.wandb.ai"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
Say = Callable[[str], None]


class Tracker(Protocol):
    """Where numbers of a run are drawn."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Numbers of one step."""
        ...

    def close(self) -> None:
        """Everything logged is out, or in the run folder."""
        ...


class TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, module: ModuleType, config: RunConfig, folder: Path, _say: Say) -> None:
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))
        self._writer.add_text("config", f"```yaml\n{config.to_yaml()}```")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """A local Trackio project; `trackio show` draws it."""

    def __init__(self, module: ModuleType, config: RunConfig, _folder: Path, say: Say) -> None:
        self._module = module
        name = name_of(config)
        module.init(project=PROJECT, name=name, config=settings_of(config), resume="allow", embed=False)
        say(f"trackio: project {PROJECT}, run {name}; trackio show --project {PROJECT}")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()


class WeightsAndBiases:
    """A Weights & Biases run: online if a key is known and the network is there, else in RUN/wandb."""

    def __init__(self, module: ModuleType, config: RunConfig, folder: Path, say: Say) -> None:
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb_key_known() and not is_offline() else "offline")
        asked = {
            "project": os.environ.get("WANDB_PROJECT", PROJECT),
            "name": name_of(config),
            "id": run_id(folder),
            "resume": "allow",
            "dir": str(folder),
            "config": settings_of(config),
            "settings": module.Settings(silent=True, console="off"),
        }
        try:
            self._run = module.init(**asked, mode=mode)
        except module.Error as error:
            say(f"wandb: {str(error).splitlines()[0]}; going on offline")
            mode = "offline"
            self._run = module.init(**asked, mode=mode)
        if mode == "offline":
            say(f"wandb: offline, in {folder / 'wandb'}; wandb sync sends it later")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


ADAPTERS = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WeightsAndBiases}


def load_trackers(config: RunConfig) -> dict[str, ModuleType]:
    """The packages that `report_to` asks for; ConfigError names the extra of one that is not installed."""
    modules = {}
    for name in config.report_to:
        try:
            modules[name] = importlib.import_module(MODULES[name])
        except ImportError:
            raise ConfigError(
                f"report_to is {name}, which is not installed; pip install 'megatrain[{name}]', or set report_to: none"
            ) from None
    return modules


def open_trackers(modules: Mapping[str, ModuleType], config: RunConfig, folder: Path, say: Say) -> list[Tracker]:
    """One tracker a package, logging."""
    return [ADAPTERS[name](module, config, folder, say) for name, module in modules.items()]


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of metrics.jsonl, lanes as "lanes/compute"; "nan" and "inf" are numbers here."""
    found: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": number for name, number in value.items()}
        elif key != "step" and (isinstance(value, int | float) or value in ("nan", "inf", "-inf")):
            found[key] = float(value)
    return found


def name_of(config: RunConfig) -> str:
    """The name a run goes by."""
    return config.run_name or Path(config.output_dir).name


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The config as trackers show it."""
    return config.model_dump(mode="json")


def run_id(folder: Path) -> str:
    """A name for the run that stays its own when it is resumed or moved."""
    file = folder / ID_NAME
    if not file.exists():
        file.write_text(secrets.token_hex(8), "ascii")
    return file.read_text("ascii").strip()


def is_offline() -> bool:
    """Whether the user forbids the network, in the way of the Hugging Face libraries."""
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in OFFLINE)


def wandb_key_known() -> bool:
    """Whether a login can do without a question. The key itself is not looked at."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False

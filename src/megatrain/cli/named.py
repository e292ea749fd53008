"""Models and datasets named on the hub -> a config that names local folders only. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from megatrain.config import RunConfig
from megatrain.config_values import DatasetPart
from megatrain.models.hub import Kind, fetched, hub_name, revision_of


def parts_of(config: RunConfig) -> tuple[DatasetPart, ...]:
    """The training datasets, one or several, in one form."""
    return (DatasetPart(path=config.dataset),) if isinstance(config.dataset, str) else config.dataset


def token_cache() -> Path:
    """Where datasets are kept as tokens, by content, for all runs of this user."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "megatrain" / "tokens"


def hub_cache() -> Path:
    """Where the files of models and datasets of the hub are linked to, one folder a revision."""
    return token_cache().with_name("hub")


def localized(config: RunConfig) -> RunConfig:
    """`config` with the folder of one revision in place of every hub name; nothing is asked of the hub without one."""
    parts = [part.model_copy(update={"path": local(part.path, "dataset")}) for part in parts_of(config)]
    changes = {
        "model": local(config.model, "model"),
        "dataset": parts[0].path if isinstance(config.dataset, str) else tuple(parts),
        "eval_dataset": None if config.eval_dataset is None else local(config.eval_dataset, "dataset"),
    }
    return config.model_copy(update=changes)


def local(text: str, kind: Kind) -> str:
    """`text`, or, where it is a name on the hub, the folder of its files, fetched once."""
    name = hub_name(text)
    return text if name is None else str(fetched(name, kind, hub_cache()))


def sources(config: RunConfig) -> dict[str, str]:
    """What of a localized config came from the hub: folder name -> `ORG/NAME@HASH`."""
    named = [config.model, *(part.path for part in parts_of(config)), config.eval_dataset]
    found = {path: revision_of(Path(path)) for path in named if path is not None}
    return {Path(path).name: revision for path, revision in found.items() if revision is not None}

"""Models and datasets named on the hub -> a config that names local folders only."""

from __future__ import annotations

from pathlib import Path

from megatrain.cli.datasets import parts_of, token_cache
from megatrain.config import RunConfig
from megatrain.models.hub import Kind, fetched, hub_name, revision_of


def localized(config: RunConfig) -> RunConfig:
    """`config` with the folder of one revision in place of every hub name; nothing is asked of the hub without one."""
    parts = [part.model_copy(update={"path": _local(part.path, "dataset")}) for part in parts_of(config)]
    changes = {
        "model": _local(config.model, "model"),
        "dataset": parts[0].path if isinstance(config.dataset, str) else tuple(parts),
        "eval_dataset": None if config.eval_dataset is None else _local(config.eval_dataset, "dataset"),
    }
    return config.model_copy(update=changes)


def _local(text: str, kind: Kind) -> str:
    name = hub_name(text)
    return text if name is None else str(fetched(name, kind, token_cache().with_name("hub")))


def sources(config: RunConfig) -> dict[str, str]:
    """What of a localized config came from the hub: folder name -> `ORG/NAME@HASH`."""
    named = [config.model, *(part.path for part in parts_of(config)), config.eval_dataset]
    found = {path: revision_of(Path(path)) for path in named if path is not None}
    return {Path(path).name: revision for path, revision in found.items() if revision is not None}

"""What `megatrain plan` is pointed at -> a config. No torch: a mistake is answered before it is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatrain.config import RunConfig, read_config


def config_to_plan(target: Path, words: Sequence[str]) -> RunConfig:
    """The config of a YAML file; of a model folder, or its config.json alone, with defaults for everything else."""
    folder = target if target.is_dir() else target.parent if target.name == "config.json" else None
    if folder is None:
        return read_config(target, words)
    given = {word.partition("=")[0] for word in words}
    defaults = [f"model={json.dumps(str(folder))}", "dataset=none"]
    return read_config(None, [*(word for word in defaults if word.partition("=")[0] not in given), *words])

"""What `megatrain plan` is pointed at -> a config. No torch: a mistake is answered before it is imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatrain.cli.named import hub_cache
from megatrain.config import RunConfig, read_config
from megatrain.config_run import run_config
from megatrain.config_spellings import keys_of
from megatrain.models.hub import fetched_config, hub_name

YAML = (".yaml", ".yml")  # of a config that is not there; not a name on the hub


def config_to_plan(target: Path, words: Sequence[str]) -> RunConfig:
    """The config of a YAML file; of a run, where it is now; of a model folder, a config.json alone, or a hub name, with
    defaults.

    Of a model on the hub only the config is fetched, and of data nothing.
    """
    config = _config_of(target, words)
    name = hub_name(config.model)
    if name is None:
        return config
    return config.model_copy(update={"model": str(fetched_config(name, hub_cache()))})


def _config_of(target: Path, words: Sequence[str]) -> RunConfig:
    if (target / "config.yaml").is_file():
        elsewhere = "output_dir" in keys_of(words)
        return read_config(target / "config.yaml", words) if elsewhere else run_config(target, words)
    model = target if target.is_dir() else target.parent if target.name == "config.json" else None
    if model is None and (target.suffix in YAML or hub_name(str(target)) is None):
        return read_config(target, words)
    defaults = [f"model={json.dumps(str(model or target))}", "dataset=none"]
    return read_config(None, [*defaults, *words])  # of two words for one key the last counts

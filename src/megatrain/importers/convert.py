"""import_config: another tool's YAML file to the text of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain.config import RunConfig, read_config_text, yaml_scalar
from megatrain.config_yaml import parse_mapping, read_bytes
from megatrain.errors import ConfigError
from megatrain.importers import axolotl, llamafactory, paper
from megatrain.importers.translation import Translation

TOOLS: Mapping[str, Callable[[Translation, Path], None]] = {
    "llamafactory": llamafactory.translate,
    "axolotl": axolotl.translate,
    "megatrain-paper": paper.translate,
}


@dataclass(frozen=True)
class Imported:
    """`text`: our YAML. `lost`: what was not carried over -> why."""

    tool: str
    text: str
    lost: Mapping[str, str]


def import_config(path: Path, tool: str) -> Imported:
    """The config in `path` as ours; `tool` is one of TOOLS, or "auto". ConfigError where it makes no valid config."""
    if tool not in (*TOOLS, "auto"):
        raise ConfigError(f"--from is {tool!r}; use auto, {', '.join(TOOLS)}")
    given = {key: item.value for key, item in parse_mapping(read_bytes(path), str(path)).items()}
    chosen = _tool_of(given, path) if tool == "auto" else tool
    it = Translation(given)
    TOOLS[chosen](it, path.parent)
    text = _text(it, chosen, path)
    read_config_text(text.encode(), f"{path} (imported)")
    return Imported(chosen, text, it.lost)


def _tool_of(given: Mapping[str, object], path: Path) -> str:
    """Which tool's keys these are."""
    if isinstance(given.get("model"), dict):
        return "megatrain-paper"
    if "base_model" in given and ("datasets" in given or "sequence_len" in given):
        return "axolotl"
    if "model_name_or_path" in given:
        return "llamafactory"
    if {"model", "dataset"} <= given.keys():
        raise ConfigError(f"{path}: model and dataset are MegaTrain's own keys; train with it as it is, or give --from")
    raise ConfigError(f"{path}: cannot tell whose config this is; name the tool with --from {' | '.join(TOOLS)}")


def _text(it: Translation, tool: str, path: Path) -> str:
    """Keys in the order of docs/config.md, then what was lost, as comments."""
    lines = [f"# From {path.name} ({tool}). Keys left out keep MegaTrain's defaults."]
    lines += [f"{key}: {yaml_scalar(it.keys[key])}" for key in RunConfig.model_fields if key in it.keys]
    if it.lost:
        lines += ["", "# Not carried over:"]
        lines += [f"#   {' '.join(name.split())}: {reason}" for name, reason in it.lost.items()]
    return "\n".join(lines) + "\n"

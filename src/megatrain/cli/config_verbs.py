"""`megatrain config …` and `megatrain init`: look at configs, translate those of other tools, begin a new one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from megatrain.config import RunConfig, read_config, spellings, yaml_scalar
from megatrain.config_page import starter
from megatrain.errors import ConfigError
from megatrain.importers import import_config

POSITIONS = {"max_position_embeddings", "n_positions"}  # what models call the number of positions they know
MIN_LENGTH = 8  # a shorter max_length is refused


def show_config(path: Path, words: Sequence[str]) -> int:
    """Print every key under our own name; other spellings and words of the command line are named beside it."""
    config = read_config(path, words)
    ours, defaults = config.model_dump(mode="json"), RunConfig(model="-", dataset="-").model_dump(mode="json")
    written = spellings(path, words)
    for key, value in ours.items():
        note = f" # written as {written[key]}" if key in written else " # default" if value == defaults[key] else ""
        print(f"{key}: {yaml_scalar(value)}{note}")
    return 0


def import_file(path: Path, tool: str, output: Path | None) -> int:
    """Print the translated config, or write it to `output`, a new file, and print what was not carried over."""
    imported = import_config(path, tool)
    if output is None:
        print(imported.text, end="")
        return 0
    write_new(output, imported.text)
    print(f"{output}: from {path} ({imported.tool})")
    for name, reason in imported.lost.items():
        print(f"not carried over: {name}: {reason}")
    return 0


def init(path: Path, model: str, dataset: str, eval_dataset: str | None) -> int:
    """Write a commented starter."""
    write_new(path, starter(model, dataset, eval_dataset, str(path), _max_length(Path(model))))
    print(f"{path}: written; next: megatrain plan {path}, megatrain data preview {path}, megatrain train {path}")
    return 0


def _max_length(model: Path) -> int:
    """The default, or less if the model's config.json, where there is one, counts fewer positions."""
    default: int = RunConfig.model_fields["max_length"].default
    try:
        members = json.loads((model / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return default  # a name on the hub, or a model that is fetched later; what is wrong with it, plan says
    sections = [members, members.get("text_config")] if isinstance(members, dict) else []
    found = [section[name] for section in sections if isinstance(section, dict) for name in POSITIONS & section.keys()]
    return min([default, *(count for count in found if isinstance(count, int) and count >= MIN_LENGTH)])


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet; ConfigError if it is, or cannot be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileNotFoundError:
        raise ConfigError(f"{path} cannot be written: {path.parent} is no folder; make it first") from None
    except FileExistsError:
        raise ConfigError(f"{path} is already there and is not overwritten; name another file") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another file") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)

"""Which folders may be written: a run and an export own theirs, and share it with nothing that is there already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatrain.cli.datasets import parts_of
from megatrain.config import RunConfig
from megatrain.errors import CheckpointError, ConfigError
from megatrain.train.run_folder import OWN_NAMES


def refuse_shared_output(config: RunConfig) -> None:
    """ConfigError if a new run's output_dir would mix its files with the model's, the data's or another run's."""
    out = Path(config.output_dir).resolve()
    if (out / "config.yaml").is_file():
        return  # a run of ours already: what it shares, it shares
    if (out / "config.json").is_file() or any(out.glob("*.safetensors")):
        raise ConfigError(f"output_dir {out} is a model folder; a run owns its folder: choose a new one")
    for key, path in _inputs(config):
        if path.exists() and (out == path or out in path.parents or path in out.parents):
            raise ConfigError(
                f"output_dir {out} and {key} {path} lie one in the other; a run owns its folder: choose a new one "
                "outside"
            )
    run = run_around(out)
    if run is not None:
        raise ConfigError(f"output_dir {out} lies among the files of the run {run}; choose a new folder outside")


def _inputs(config: RunConfig) -> Iterator[tuple[str, Path]]:
    yield "model", Path(config.model).resolve()
    for part in parts_of(config):
        yield "dataset", Path(part.path).resolve()
    if config.eval_dataset is not None:
        yield "eval_dataset", Path(config.eval_dataset).resolve()


def refuse_export_target(target: Path) -> None:
    """CheckpointError unless `target` is a new folder in one that is there, and not among the files of a run."""
    if target.exists():
        raise CheckpointError(f"{target} is already there; give a new folder")
    if not target.absolute().parent.is_dir():
        raise CheckpointError(f"{target} cannot be made: {target.absolute().parent} is no folder; make it first")
    run = run_around(target.resolve())
    if run is not None:
        raise CheckpointError(f"{target} lies among the files of the run {run}; give a new folder outside")


def run_around(path: Path) -> Path | None:
    """The run that owns `path`, one of its own names or below one; None if none does."""
    for inner, outer in zip((path, *path.parents), path.parents, strict=False):
        if inner.name in OWN_NAMES and (outer / "config.yaml").is_file():
            return outer
    return None

"""Which folders may be written: a run and an export own theirs, and share it with nothing that is there. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatrain.cli.named import parts_of
from megatrain.config import RunConfig
from megatrain.config_run import OWN_NAMES, why_no_run
from megatrain.errors import CheckpointError, ConfigError, PlanError
from megatrain.planner.sizes import SLACK_DISK_BYTES
from megatrain.planner.table import gib


def refuse_shared_output(config: RunConfig) -> None:
    """ConfigError if a new run's output_dir would mix its files with the model's, the data's or another run's."""
    out = Path(config.output_dir).resolve()
    if (out / "config.yaml").is_file():
        return  # a run of ours already: what it shares, it shares
    if any(out.glob("checkpoints/step-*")):
        raise CheckpointError(why_no_run(out))
    if (out / "config.json").is_file() or any(out.glob("*.safetensors")):
        raise ConfigError(f"output_dir {out} is a model folder; a run owns its folder: choose a new one")
    for key, path in _inputs(config):
        if path.exists() and (out == path or out in path.parents or path in out.parents):
            raise ConfigError(
                f"output_dir {out} and {key} {path} lie one in the other; a run owns its folder: choose a new one "
                "outside"
            )
    strangers = _strangers(out)
    if strangers:
        named = ", ".join(strangers[:3]) + (", …" if strangers[3:] else "")
        raise ConfigError(f"output_dir {out} holds other folders ({named}); a run owns its folder: choose a new one")
    run = run_around(out)
    if run is not None:
        raise ConfigError(f"output_dir {out} lies among the files of the run {run}; choose a new folder outside")


def _strangers(out: Path) -> list[str]:
    """Folders in `out` that are no run's: it is a project, or a home. A job's log may lie there."""
    if not out.is_dir():
        return []
    ours = {*OWN_NAMES, "lost+found"}
    return sorted(
        path.name for path in out.iterdir() if path.name not in ours and path.name[0] != "." and path.is_dir()
    )


def refuse_no_room(config: RunConfig, num_parameters: int, free_bytes: int) -> None:
    """PlanError if a run without checkpoints would find no room for its model at the end, when all else is lost."""
    if config.save_strategy != "no":
        return  # the plan counts checkpoints
    needed_bytes = num_parameters * (2 if config.precision == "bf16" else 4) + SLACK_DISK_BYTES
    if needed_bytes > free_bytes:
        raise PlanError(
            f"the model at the end of the run takes {gib(needed_bytes)} in {config.output_dir}, {gib(free_bytes)} "
            "are free; free disk space, or choose an output_dir on another disk"
        )


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

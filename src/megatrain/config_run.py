"""A run folder from outside: the names it owns, the config and the checkpoints it keeps. No torch."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Sequence
from pathlib import Path

from megatrain.config import RunConfig, read_config
from megatrain.errors import CheckpointError, UserError

LOCK_NAME = ".lock"
# What a run writes before its first step.
STARTED = (LOCK_NAME, "config.yaml", "plan.json", "env.json", "metrics.jsonl", "log.txt")
# All that a run owns in its folder.
OWN_NAMES = (
    *STARTED, "trace.jsonl", "checkpoints", "LATEST", "BEST", "model", "report", "tensorboard", "wandb", "trackio",
)  # fmt: skip
# Facts of a run that are no keys of its config; a resume must find them unchanged.
FACTS = ("data", "versions")
_STEP = re.compile(r"step-(0|[1-9][0-9]*)")


def run_config(path: Path, words: Sequence[str] = ()) -> RunConfig:
    """The config of a run folder, with `key=value` words, for where it is now; CheckpointError if it is none."""
    if not (path / "config.yaml").is_file():
        raise CheckpointError(why_no_run(path))
    return read_config(path / "config.yaml", words).model_copy(update={"output_dir": str(path.absolute())})


def saved_steps(path: Path) -> list[int]:
    """Steps of the run that have a checkpoint, lowest first; nothing of them is read."""
    found = (_STEP.fullmatch(folder.name) for folder in (path / "checkpoints").glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def in_use(path: Path, lock: int) -> UserError:
    """The refusal of a run folder whose lock file, open as `lock`, another process holds."""
    owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
    return UserError(
        f"output_dir {path} is in use by another run (process {owner}); wait for it, or choose another folder"
    )


def refuse_in_use(path: Path) -> None:
    """UserError if a run is going on in `path` now. It only looks: whoever starts a run there takes the lock itself."""
    try:
        lock = os.open(path / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # nothing there yet, or nothing to be used: a start says which
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise in_use(path, lock) from None
    finally:
        os.close(lock)


def why_no_run(path: Path) -> str:
    """What is missing in a folder without a config.yaml that should be a run's, and the remedy."""
    if not path.is_dir():
        what = "it is a file" if path.exists() else "it is not there"
        return f"{path} is no run folder: {what}; give the output_dir of a run"
    if path.parent.name == "checkpoints" and (path.parent.parent / "config.yaml").is_file():
        return f"{path} is a checkpoint, no run folder; give {path.parent.parent}"
    steps = sorted(path.glob("checkpoints/step-*/model"), key=lambda folder: folder.parent.stat().st_mtime)
    if steps:
        return (
            f"{path} has checkpoints but no config.yaml, which says what they were trained with; put that file back, "
            f"or start a new run in another output_dir with model: {steps[-1]}"
        )
    return f"{path} is no run folder: it has no config.yaml; give the output_dir of a run"


def replace_text(path: Path, text: str) -> None:
    """Write `text` so that `path` is the old file or the new one, never a part. Mode 0600."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)

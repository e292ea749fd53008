"""RunFolder: the folder a run owns. One process at a time; private to its user."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from megatrain.config import RunConfig, changed_keys, read_config
from megatrain.config_run import LOCK_NAME, STARTED, in_use, replace_text
from megatrain.errors import CheckpointError, ConfigError


class RunFolder:
    """`path` with its lock held from creation to `close`. UserError if another process holds it.

    Left before `started`, it leaves nothing behind that was not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._new_folders = [folder for folder in (path, *path.parents) if not folder.exists()]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
            path.chmod(0o700)
            self._new_files = [name for name in STARTED if not (path / name).exists()]
            self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            self._remove_new_folders()
            raise ConfigError(f"output_dir {path} cannot be used: {error.strerror}; choose another folder") from None
        if not self._take_lock():
            refusal = in_use(path, self._lock)
            os.close(self._lock)
            raise refusal
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _take_lock(self) -> bool:
        """Whether the lock is ours, and still the one that lies in the folder (a failed start removes its own)."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK_NAME))
        except (BlockingIOError, FileNotFoundError):
            return False

    @property
    def config(self) -> Path:
        """config.yaml: the resolved config of the run."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl: one object a step."""
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        """trace.jsonl: the ops of one warm step, for `megatrain plan --trace`."""
        return self.path / "trace.jsonl"

    @property
    def log(self) -> Path:
        """log.txt: what was printed."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """checkpoints/: step-N folders."""
        return self.path / "checkpoints"

    def begin(self, config: RunConfig, plan: Mapping[str, object], environment: Mapping[str, object]) -> None:
        """Write config.yaml, plan.json and env.json. Each is whole or the old one."""
        replace_text(self.config, config.to_yaml())
        replace_text(self.path / "plan.json", json.dumps(plan, indent=1))
        replace_text(self.path / "env.json", json.dumps(environment, indent=1))

    def refuse_changes(self, config: RunConfig, allowed: frozenset[str]) -> None:
        """CheckpointError if a key that may change bits differs from the run's config.yaml and is not allowed."""
        before = read_config(self.config)
        changed = [key for key in changed_keys(before, config) if key not in allowed]
        if changed:
            key = changed[0]
            was, now = before.model_dump(mode="json")[key], config.model_dump(mode="json")[key]
            raise CheckpointError(
                f"{key} is {now!r}, but the run in {self.path} was started with {was!r}; set it back, "
                f"or resume with --allow {key}, or choose another output_dir"
            )

    def cut_metrics(self, last_step: int) -> None:
        """Drop metrics of steps after `last_step`: they were not saved and will be trained again.

        Lines that a crash left torn or filled with zeros are dropped too; `last_step` 0 is a run from its start.
        """
        if not self.metrics.exists():
            return
        lines = self.metrics.read_text("utf-8", errors="replace").split("\n")
        kept = [line for line in lines if last_step > 0 and _step_of(line) <= last_step]
        replace_text(self.metrics, "".join(f"{line}\n" for line in kept))

    def started(self) -> None:
        """From now on, what is in the folder stays: the first step is about to be made."""
        self._new_files, self._new_folders = [], []

    def close(self) -> None:
        """Give the folder free, without what a start that failed has put there."""
        for name in self._new_files:
            (self.path / name).unlink(missing_ok=True)
        os.close(self._lock)
        self._remove_new_folders()

    def _remove_new_folders(self) -> None:
        """Innermost first; one that is not empty stays, and so do those around it."""
        with suppress(OSError):
            for folder in self._new_folders:
                folder.rmdir()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _step_of(line: str) -> float:
    """The step of a line of metrics; infinity if it is none."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return math.inf
    return row["step"] if isinstance(row, dict) and "step" in row else math.inf

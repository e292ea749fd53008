"""Files that fail: operation k errs, stops short, or is the last before a kill or a power cut."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from megatrain.checkpoint.fs import Data, Files


class QuickFiles(Files):
    """Without waiting for the disk: a test cannot see whether the real fsync happened, `PowerCutFiles` models it."""

    def fsync(self, fd: int) -> None:
        assert fd >= 0

    def sync_folder(self, path: Path) -> None:
        assert path.is_dir()


class Killed(BaseException):
    """The process is gone: nothing may catch this and go on."""


class FaultyFiles(QuickFiles):
    """Counts operations; number `at` (from 0) raises `error`. With Killed every later one raises too."""

    def __init__(self, at: int, error: BaseException | None) -> None:
        self.count = 0
        self.at = at
        self.error = error
        self.names_done: list[str] = []

    def _operation(self, name: str) -> None:
        number, self.count = self.count, self.count + 1
        dead = isinstance(self.error, Killed) and number > self.at
        if self.error is not None and (number == self.at or dead):
            raise self.error
        self.names_done.append(name)

    def make_folder(self, path: Path) -> None:
        self._operation("make_folder")
        super().make_folder(path)

    def create(self, path: Path) -> int:
        self._operation("create")
        return super().create(path)

    def reserve(self, fd: int, num_bytes: int) -> None:
        self._operation("reserve")
        super().reserve(fd, num_bytes)

    def write(self, fd: int, data: Data) -> int:
        self._operation("write")
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._operation("fsync")
        super().fsync(fd)

    def close(self, fd: int) -> None:
        super().close(fd)  # a killed process's files are closed too, and close(2) frees the number even when it errs
        self._operation("close")

    def open(self, path: Path) -> int:
        self._operation("open")
        return super().open(path)

    def read(self, fd: int, buffer: Data, offset_bytes: int) -> int:
        self._operation("read")
        return super().read(fd, buffer, offset_bytes)

    def rename(self, old: Path, new: Path) -> None:
        self._operation("rename")
        super().rename(old, new)

    def sync_folder(self, path: Path) -> None:
        self._operation("sync_folder")
        super().sync_folder(path)

    def names(self, path: Path) -> list[str]:
        self._operation("names")
        return super().names(path)

    def remove_file(self, path: Path) -> None:
        self._operation("remove_file")
        super().remove_file(path)

    def remove_folder(self, path: Path) -> None:
        self._operation("remove_folder")
        super().remove_folder(path)

    def free_bytes(self, path: Path) -> int:
        self._operation("free_bytes")
        return super().free_bytes(path)


class ShortFiles(FaultyFiles):
    """Operation `at`, if it is a read or a write, does half of it; nothing errs."""

    def __init__(self, at: int) -> None:
        super().__init__(at, None)

    def write(self, fd: int, data: Data) -> int:
        return super().write(fd, self._shortened(data))

    def read(self, fd: int, buffer: Data, offset_bytes: int) -> int:
        return super().read(fd, self._shortened(buffer), offset_bytes)

    def _shortened(self, data: Data) -> memoryview:
        view = memoryview(data).cast("B")
        return view[: max(1, view.nbytes // 2)] if self.count == self.at else view


class PowerCutFiles(FaultyFiles):
    """Dies at operation `at` and then loses what was not made durable: see `cut`.

    A file's data is durable after fsync, a folder's entries (create, make, rename) after sync_folder of the folder.
    Removals are taken as durable at once: the worst for whoever relies on what was removed.
    """

    def __init__(self, at: int) -> None:
        super().__init__(at, Killed())
        self._paths: dict[int, Path] = {}  # open fd -> path
        self._dirty: list[Path] = []
        self._entries: list[tuple[Path, Path | None]] = []  # (entry, what it was called before), oldest first

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._entries.append((path, None))

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._paths[fd] = path
        self._entries.append((path, None))
        self._dirty.append(path)
        return fd

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self._dirty.remove(self._paths[fd])

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)

        def moved(path: Path) -> Path:
            return new / path.relative_to(old) if path.is_relative_to(old) else path

        self._dirty = [moved(path) for path in self._dirty]
        self._entries = [(moved(path), before) for path, before in self._entries]
        self._entries.append((new, old))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._entries = [entry for entry in self._entries if entry[0].parent != path]

    def cut(self, chosen: random.Random) -> None:
        """The power is gone: unsynced data is lost from some 4 KiB page on, the last of the unsynced entries too."""
        for path in self._dirty:
            if path.exists():
                size_bytes = path.stat().st_size
                kept_bytes = min(size_bytes, 4096 * chosen.randint(0, size_bytes // 4096 + 1))
                if chosen.random() < 0.7:
                    os.truncate(path, kept_bytes)
                    os.truncate(path, chosen.choice([kept_bytes, size_bytes]))
        keep = chosen.choice([0, chosen.randint(0, len(self._entries))])
        for path, before in reversed(self._entries[keep:]):
            if before is not None and path.exists():
                os.rename(path, before)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def count_operations(work: Callable[[Files], object]) -> int:
    """How many operations `work` takes when nothing fails."""
    files = FaultyFiles(-1, None)
    work(files)
    return files.count

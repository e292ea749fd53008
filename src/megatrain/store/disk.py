"""DiskHomes: the kinds of segments that live on disk, and the landing slots in RAM through which they are reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatrain.memory import DiskFile, HostArena, padded


class Home(NamedTuple):
    """One kind of one segment."""

    segment: str
    kind: str
    count: int  # of elements
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.count * self.dtype.itemsize


class DiskHomes:
    """An extent of a scratch file in `folder` for each home, zero at first; `num_slots` landing slots.

    A landing slot has a place for every kind, as large as the largest home of that kind (`slot_bytes`, whole pages).
    Different slots may be loaded, spilled and used at the same time; a slot serves one at a time.
    """

    def __init__(self, folder: Path, homes: Sequence[Home], slot_bytes: Mapping[str, int], num_slots: int) -> None:
        self._homes = {(home.segment, home.kind): home for home in homes}
        self._offsets: dict[str, int] = {}  # kind -> where its slots begin in the arena
        total_bytes = 0
        for kind, size_bytes in slot_bytes.items():
            self._offsets[kind] = total_bytes
            total_bytes += num_slots * size_bytes
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self.landing_bytes = total_bytes
        self._arena = HostArena(total_bytes)
        self.file = DiskFile(folder, {_extent(home.segment, home.kind): home.num_bytes for home in homes})

    def landing(self, segment: str, kind: str, slot: int) -> Tensor:
        """The buffer of landing slot `slot`, cut to `kind` of `segment`: 1-D, zero-copy."""
        home = self._homes[segment, kind]
        return self._arena.view(self._offset(kind, slot), home.count, home.dtype)

    def slots_of(self, kind: str) -> list[Tensor]:
        """The whole slots of a kind, as bytes: what is pinned."""
        if kind not in self._slot_bytes:
            return []
        size_bytes = self._slot_bytes[kind]
        return [self._arena.view(self._offset(kind, k), size_bytes, torch.uint8) for k in range(self._num_slots)]

    def load(self, segment: str, slots: Mapping[str, int]) -> None:
        """From disk to landing slots: kind -> slot. DiskError unless the bytes are those last spilled."""
        self.file.read([self._transfer(segment, kind, slot) for kind, slot in slots.items()])

    def spill(self, segment: str, slots: Mapping[str, int]) -> None:
        """From landing slots to disk: kind -> slot."""
        self.file.write([self._transfer(segment, kind, slot) for kind, slot in slots.items()])

    def close(self) -> None:
        """Gives disk and memory back; no transfer may be going on."""
        self.file.close()
        self._arena.close()

    def _transfer(self, segment: str, kind: str, slot: int) -> tuple[str, Tensor]:
        num_bytes = padded(self._homes[segment, kind].num_bytes)
        return _extent(segment, kind), self._arena.view(self._offset(kind, slot), num_bytes, torch.uint8)

    def _offset(self, kind: str, slot: int) -> int:
        assert 0 <= slot < self._num_slots, f"landing slot {slot} of {self._num_slots}"
        return self._offsets[kind] + slot * self._slot_bytes[kind]


def _extent(segment: str, kind: str) -> str:
    return f"{segment}.{kind}"

"""Contents: what places hold, and what an op needs of them, in the words of the checker."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from megatrain.schedule.ops import Place, Program


class Content(NamedTuple):
    """What a place holds. Two contents are equal exactly if the bits must be.

    `when`: for weights, state and files the number of steps settled (applied, or skipped by the cell); for gradients,
    norms and the cell the step; for everything else the program that made it. `count`: micro-batches summed so far,
    always 0 … count-1 in order.
    """

    what: str
    of: str | int = ""
    micro_batch: int | None = None
    when: int = 0
    count: int | None = None

    def __str__(self) -> str:
        of = f" of {self.of}" if self.of != "" else ""
        micro_batch = f" m{self.micro_batch}" if self.micro_batch is not None else ""
        if self.what in ("weights", "state", "file"):
            return f"{self.what}{of} after step {self.when}"
        if self.count is not None:
            return f"{self.what}{of}, step {self.when}, sum of {self.count} micro-batches"
        return f"{self.what}{of}{micro_batch}, {'step' if self.what in ('norm', 'cell') else 'program'} {self.when}"


class Fault(Exception):
    """An op that means nothing in this program; caught by the checker, which adds the place."""


Wanted = tuple[Collection[Place], Content]  # a content, and the places where it may be


class Need(NamedTuple):
    """What an op reads and writes, in the order of its places."""

    reads: list[Wanted]
    writes: list[Wanted]


class Trio(NamedTuple):
    """The places that an UPDATE is about."""

    state: Place
    weights: Place
    grad: Place


class Now(NamedTuple):
    """Where in the sequence of programs we are. Programs and steps count from 1; a step is a "train" program."""

    program: Program
    number: int  # of this program
    num_micro_batches: int
    step: int  # the step that this program computes, or the last one that was
    settled: int  # steps whose UPDATEs are done once this program's are
    settled_micro_batches: int  # of step `settled`
    computed_with: int  # steps that are in the weights which pass through the layers

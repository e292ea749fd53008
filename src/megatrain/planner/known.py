"""Known: a number for every segment that was seen, found again by identity. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatrain.schedule.plan import SegmentPlan


class Known:
    """Numbers of segments. Identity is quick to look up (the search asks for ten thousand plans that are made of the
    same few hundred segments); what was seen is held, so that nothing else takes its id."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._held: list[SegmentPlan] = []

    def of(self, segments: Sequence[SegmentPlan], number: Callable[[int], int]) -> list[int]:
        """The number of each. `number`: for one that was not seen before, by where it is among `segments`."""
        try:
            return [self._numbers[id(segment)] for segment in segments]
        except KeyError:
            for index, segment in enumerate(segments):
                if id(segment) not in self._numbers:
                    self._numbers[id(segment)] = number(index)
                    self._held.append(segment)
            return [self._numbers[id(segment)] for segment in segments]

"""Room card of the schedule.

Holds:          Plan, Op, Place, Schedule; build, waits, text, check, liveness, simulate.
Takes -> gives: Plan, program, number of micro-batches -> a tuple of ops that any device can execute.
May touch:      nothing outside its arguments; every function is pure.
Must never:     know a device, a size or a duration; import torch.
"""

from megatrain.schedule.build import build, rounds
from megatrain.schedule.ops import CELL, TIED_GRAD, Kind, Lane, Op, Place, Program, Schedule
from megatrain.schedule.plan import Plan, SegmentPlan, validate
from megatrain.schedule.text import parse, to_text

__all__ = [
    "CELL",
    "TIED_GRAD",
    "Kind",
    "Lane",
    "Op",
    "Place",
    "Plan",
    "Program",
    "Schedule",
    "SegmentPlan",
    "build",
    "parse",
    "rounds",
    "to_text",
    "validate",
]

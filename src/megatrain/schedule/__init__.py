"""Room card of the schedule.

Holds:          Plan, Op, Place, Schedule; build, waits, text, check, liveness, simulate.
Takes -> gives: Plan, program, number of micro-batches -> a tuple of ops that any device can execute.
May touch:      nothing outside its arguments; every function is pure.
Must never:     know a device, a size or a duration; import torch.
"""

from megatrain.schedule.build import build, rounds
from megatrain.schedule.check import Run, ScheduleError, check
from megatrain.schedule.liveness import last_calls
from megatrain.schedule.ops import CELL, TIED_GRAD, Kind, Lane, Op, Place, Program, Schedule
from megatrain.schedule.plan import Plan, SegmentPlan, validate
from megatrain.schedule.simulate import DeadlockError, Sharing, Simulation, Use, simulate
from megatrain.schedule.text import ScheduleTextError, parse, to_text
from megatrain.schedule.waits import one_by_one

__all__ = [
    "CELL",
    "TIED_GRAD",
    "DeadlockError",
    "Kind",
    "Lane",
    "Op",
    "Place",
    "Plan",
    "Program",
    "Run",
    "Schedule",
    "ScheduleError",
    "ScheduleTextError",
    "SegmentPlan",
    "Sharing",
    "Simulation",
    "Use",
    "build",
    "check",
    "last_calls",
    "one_by_one",
    "parse",
    "rounds",
    "simulate",
    "to_text",
    "validate",
]

"""Learning-rate schedules: pure functions of the optimizer step, with the formulas of transformers.

Step s counts optimizer steps from 0; the learning rate of step s is peak * multiplier(schedule, s). W warm-up steps,
N steps in all:

    warm-up, all kinds                 s / W                            for s < W
    constant                           1
    linear                             (N - s) / (N - W)
    cosine                             (1 + cos(pi p)) / 2              p = (s - W) / (N - W)
    cosine_with_min_lr                 r + (1 - r) * cosine             r = min_ratio
    warmup_stable_decay                1, and over the last D steps r + (1 - r) * shape(q), q from 0 to 1;
                                       its warm-up starts from r: r + (1 - r) * s / W
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

ScheduleKind = Literal["constant", "linear", "cosine", "cosine_with_min_lr", "warmup_stable_decay"]
DecayShape = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class LearningRateSchedule:
    """What the multiplier depends on besides the step."""

    kind: ScheduleKind
    num_steps: int
    warmup_steps: int = 0
    decay_steps: int = 0  # warmup_stable_decay only
    decay_shape: DecayShape = "cosine"  # warmup_stable_decay only
    min_ratio: float = 0.0  # cosine_with_min_lr and warmup_stable_decay: the floor as a share of the peak

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ValueError(f"unknown schedule {self.kind!r}; choose one of {', '.join(get_args(ScheduleKind))}")
        if self.decay_shape not in get_args(DecayShape):
            raise ValueError(
                f"unknown decay shape {self.decay_shape!r}; choose one of {', '.join(get_args(DecayShape))}"
            )
        if min(self.num_steps, self.warmup_steps, self.decay_steps) < 0:
            raise ValueError(f"{self}: step counts must not be negative")
        if not 0.0 <= self.min_ratio <= 1.0:
            raise ValueError(f"min_ratio is {self.min_ratio}; it is a share of the peak learning rate, from 0 to 1")
        if self.kind == "warmup_stable_decay" and self.warmup_steps + self.decay_steps > self.num_steps:
            raise ValueError(
                f"{self.warmup_steps} warm-up and {self.decay_steps} decay steps do not fit into {self.num_steps} steps"
            )


def count_warmup_steps(num_steps: int, warmup_steps: int, warmup_ratio: float) -> int:
    """`warmup_steps` if given (not 0), else `warmup_ratio` of all steps, rounded up."""
    if warmup_steps and warmup_ratio:
        raise ValueError(f"warmup_steps {warmup_steps} and warmup_ratio {warmup_ratio} exclude each other; give one")
    if not 0.0 <= warmup_ratio <= 1.0:
        raise ValueError(f"warmup_ratio is {warmup_ratio}; it is a share of all steps, from 0 to 1")
    return warmup_steps or math.ceil(num_steps * warmup_ratio)


def multiplier(schedule: LearningRateSchedule, step: int) -> float:
    """The share of the peak learning rate that optimizer step `step` (from 0) uses."""
    if step < 0:
        raise ValueError(f"step is {step}; optimizer steps count from 0")
    floor = schedule.min_ratio if schedule.kind in ("cosine_with_min_lr", "warmup_stable_decay") else 0.0
    if step < schedule.warmup_steps:
        share = step / schedule.warmup_steps
        return share * (1.0 - floor) + floor if schedule.kind == "warmup_stable_decay" else share
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "warmup_stable_decay":
        start = schedule.num_steps - schedule.decay_steps
        if step < start:
            return 1.0
        if step >= schedule.num_steps:
            return floor
        factor = _shape(schedule.decay_shape, (step - start) / schedule.decay_steps)
        return max(0.0, factor * (1.0 - floor) + floor)
    remaining = max(1, schedule.num_steps - schedule.warmup_steps)
    if schedule.kind == "linear":
        return max(0.0, (schedule.num_steps - step) / remaining)
    return max(0.0, _shape("cosine", (step - schedule.warmup_steps) / remaining) * (1.0 - floor) + floor)


def _shape(shape: DecayShape, progress: float) -> float:
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0 - math.sqrt(progress)

"""Room card.

Holds: AdamW, the hi/lo master, the global norm and learning-rate schedules: a numpy specification and a C++ form of it.
Takes -> gives: flat arrays and the step's scalars -> the arrays updated in place; shapes and sums -> the norm.
May touch: the arrays it is given; threads of its own for the length of one call.
Must never: own parameters, know a segment or a device, differ from the specification by one bit.
"""

from megatrain.optim.adamw import update_fp32, update_split
from megatrain.optim.norm import clip_coefficient, tensor_sum_squares, total_norm
from megatrain.optim.schedules import LearningRateSchedule, count_warmup_steps, multiplier
from megatrain.optim.spec import AdamW, Scalars, average_share, join, scalars, split

__all__ = [
    "AdamW",
    "LearningRateSchedule",
    "Scalars",
    "average_share",
    "clip_coefficient",
    "count_warmup_steps",
    "join",
    "multiplier",
    "scalars",
    "split",
    "tensor_sum_squares",
    "total_norm",
    "update_fp32",
    "update_split",
]

"""Room card of the planner.

Holds:         sizes and seconds of everything a run does, the search for a Plan, the memory table and its verdict.
Takes -> gives: ModelSpec, RunConfig, Machine, Rates -> (Plan, MemoryTable, Prediction), or a PlanError that names what
               would fit.
May touch:     nothing outside its arguments; every function is pure.
Must never:    allocate, run, or import torch.
"""

from megatrain.planner.account import Question, memory_table, question_of
from megatrain.planner.advice import misfit, refuse_endless, refuse_misfit
from megatrain.planner.cheapest import search
from megatrain.planner.family import least_bytes
from megatrain.planner.prediction import Prediction, Workload, predict
from megatrain.planner.table import MemoryRow, MemoryTable

__all__ = [
    "MemoryRow",
    "MemoryTable",
    "Prediction",
    "Question",
    "Workload",
    "least_bytes",
    "memory_table",
    "misfit",
    "predict",
    "question_of",
    "refuse_endless",
    "refuse_misfit",
    "search",
]

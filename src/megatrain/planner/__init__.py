"""Room card of the planner.

Holds:         sizes of everything a run allocates, the choice of a Plan, the memory table and its verdict.
Takes -> gives: ModelSpec, RunConfig, Machine -> (Plan, MemoryTable), or a PlanError that names what would fit.
May touch:     nothing outside its arguments; every function is pure.
Must never:    allocate, run, or import torch.
"""

from megatrain.planner.choose import misfit, plan_run, refuse_misfit
from megatrain.planner.table import MemoryRow, MemoryTable

__all__ = ["MemoryRow", "MemoryTable", "misfit", "plan_run", "refuse_misfit"]

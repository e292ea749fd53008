"""Memory that runs out although the plan fits: said with the budget, the peak and a remedy, not with a traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatrain.cli.assemble import Planned
from megatrain.errors import PlanError
from megatrain.memory import peak_rss_bytes
from megatrain.planner.table import gib
from megatrain.schedule.plan import Tier

# How libraries spell it where they have no exception of its own for it.
HBM_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
RAM_WORDS = ("DefaultCPUAllocator", "Cannot allocate memory")
REMEDIES: dict[Tier, str] = {
    "hbm": "set memory.hbm to {less} so that the planner leaves more free, or lower micro_batch_tokens or max_length; "
    "nvidia-smi shows who else uses the GPU",
    "ram": "set memory.ram to {less} so that the planner leaves more free, end other programs, or raise the memory "
    "limit of the container",
}


def tier_of(error: Exception) -> Tier | None:
    """The memory that ran out; None: the error is another one."""
    if isinstance(error, torch.OutOfMemoryError):
        return "hbm"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "ram"
    text = str(error)
    if any(words in text for words in HBM_WORDS):
        return "hbm"
    return "ram" if any(words in text for words in RAM_WORDS) else None


@contextmanager
def explained_shortage(run: Planned) -> Iterator[None]:
    """Inside, memory that ran out is a PlanError of one sentence. What was saved stands."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        tier = tier_of(error)
        if tier is None:
            raise
        budget_bytes, planned_bytes = run.table.budgets[tier], run.table.total_bytes(tier)
        peak_bytes = torch.cuda.max_memory_reserved(run.device) if tier == "hbm" else peak_rss_bytes()
        reason = str(error).split("\n", 1)[0][:200] or type(error).__name__
        remedy = REMEDIES[tier].format(less=gib(budget_bytes * 9 // 10).replace(" ", ""))
        raise PlanError(
            f"{tier} ran out: the plan counts {gib(planned_bytes)} of a budget of {gib(budget_bytes)}, this process "
            f"reached {gib(peak_bytes)} ({reason}); {remedy}"
        ) from error

"""The framework's own kernels, held to the same bits in every run: what `deterministic: true` asks of them on a GPU."""

from __future__ import annotations

import os
import warnings

import torch
import torch.utils.deterministic as filling

# Called not deterministic by the framework, but the same in every run where models use them (tests/gpu/spread.py):
# cumulative sums along one axis of several, and counts, which are whole numbers.
REPEATS_ANYWAY = ("cumsum_cuda_kernel", "_histc_cuda")


def repeat_bits(wanted: bool) -> None:
    """Make sums of the framework on a GPU repeat bit for bit in this process, or let them come in any order.

    Call it before the first product on the GPU: cuBLAS reads its setting once. What matters to models is `index_add`,
    by which some families sum the rows of more than two experts: without this, in any order. A kernel that has no
    repeatable form still runs, and the framework warns of it by name.
    """
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    # Only to find reads of memory that nothing wrote; it costs a pass over every new tensor.
    filling.fill_uninitialized_memory = False
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # 32 MiB, what Hopper takes unasked
        for kernel in REPEATS_ANYWAY:
            warnings.filterwarnings("ignore", message=f"{kernel} does not have a deterministic implementation")

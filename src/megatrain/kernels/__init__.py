"""The update and the norm on the device, in Triton; the average of the masters, in plain torch.

Holds:      the formulas of optim.spec for state whose home is HBM; the average's for any home.
Takes -> gives: flat device tensors and one step's scalars -> the same tensors updated; sums of squares on the device.
May touch:  the elements of the tensors it is given.
Must never: own a parameter, choose a device, wait for one, or differ from optim.spec in a bit.
"""

from __future__ import annotations

from megatrain.kernels.average import average_
from megatrain.kernels.update import adamw_fp32_, adamw_split_, tensor_sums

__all__ = ["adamw_fp32_", "adamw_split_", "average_", "tensor_sums"]

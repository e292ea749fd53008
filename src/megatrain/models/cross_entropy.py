"""Token losses of a chunk of logits: eager on a CPU, one fused pass each way on a GPU.

Softmax in fp32 from the logits' own dtype. The fused form reads the logits once forward, and once backward, where it
writes their gradient in their place: 6 bytes of traffic a bf16 logit where the framework's operators make 36, and 2
bytes of memory instead of 13; in a place of its own it left a hole too small for dW (1.1 GB of Gemma 3 4B's, for which
the pool stopped the GPU four times a step). One program works through one row in order, so results repeat bit for bit.
Legend: C tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.functional import cross_entropy

from megatrain.models.batch import IGNORED_LABEL

if torch.version.cuda is not None:  # a framework built for CUDA brings Triton along
    from megatrain.models import cross_entropy_triton


def token_losses(logits_CV: Tensor, labels_C: Tensor, label_smoothing: float) -> Tensor:
    """loss_C in fp32: (1 - s) * -log p[label] + s * mean over V of -log p; 0 where there is no label.

    On a GPU the backward overwrites the logits; autograd refuses if another operator saved them.
    """
    if logits_CV.is_cuda:
        return _Fused.apply(logits_CV, labels_C, label_smoothing)
    return cross_entropy(
        logits_CV.float(), labels_C, ignore_index=IGNORED_LABEL, reduction="none", label_smoothing=label_smoothing
    )


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_CV: Tensor, labels_C: Tensor, smoothing: float) -> Tensor:
        assert logits_CV.stride(1) == 1, f"logits with strides {logits_CV.stride()}"
        num_rows, num_columns = logits_CV.shape
        loss_C, max_C, log_sum_C = (logits_CV.new_empty(num_rows, dtype=torch.float32) for _ in range(3))
        with torch.cuda.device_of(logits_CV):
            cross_entropy_triton.forward_kernel[(num_rows,)](
                logits_CV, labels_C, loss_C, max_C, log_sum_C, logits_CV.stride(0), num_columns, smoothing,
                SMOOTH=smoothing > 0, IGNORED=IGNORED_LABEL, **cross_entropy_triton.LAUNCH,
            )  # fmt: skip
        ctx.save_for_backward(logits_CV, labels_C, max_C, log_sum_C)
        ctx.smoothing = smoothing
        return loss_C

    @staticmethod
    def backward(ctx: Any, dloss_C: Tensor) -> tuple[Tensor, None, None]:
        logits_CV, labels_C, max_C, log_sum_C = ctx.saved_tensors
        num_rows, num_columns = logits_CV.shape
        with torch.cuda.device_of(logits_CV):
            cross_entropy_triton.backward_kernel[(num_rows,)](
                dloss_C.contiguous(), logits_CV, labels_C, max_C, log_sum_C, logits_CV.stride(0), num_columns,
                ctx.smoothing, IGNORED=IGNORED_LABEL, **cross_entropy_triton.LAUNCH,
            )  # fmt: skip
        increment_version(logits_CV)  # the framework does not see what a kernel of ours writes
        return logits_CV.detach(), None, None

"""What `megatrain doctor` measures with a model's own code: apart, as that loads for 3 s and only a GPU needs it."""

from __future__ import annotations

import torch

from megatrain.hardware.probe import sustained_per_s
from megatrain.models.attention import attention
from megatrain.models.flops import visible_pairs

CUDA = torch.device("cuda")
ATTENTION = (8192, 32, 8, 128)  # tokens, heads, key/value heads, head size: of an 8B model


def attention_flops_per_s(limit_s: float) -> float:
    """Operations a second of the forward of causal attention as training runs it by default."""
    num_tokens, heads, kv_heads, size = ATTENTION
    q_1HTD, k_1GTD, v_1GTD = (
        torch.randn(1, count, num_tokens, size, device=CUDA, dtype=torch.bfloat16)
        for count in (heads, kv_heads, kv_heads)
    )
    one_document = torch.zeros(1, dtype=torch.int32, device=CUDA)
    per_s = sustained_per_s(
        lambda: attention(q_1HTD, k_1GTD, v_1GTD, one_document, scale=size**-0.5), CUDA, 32, limit_s
    )
    return per_s * 4 * heads * size * visible_pairs(num_tokens, None)

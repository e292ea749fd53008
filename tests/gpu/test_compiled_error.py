"""Compiled layers are as accurate as eager ones (error against fp32, forward and gradients), and pin no memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from megatrain.models.batch import TokenBatch
from megatrain.models.determinism import repeat_bits
from megatrain.models.grad import block_backward
from megatrain.models.template import ModelTemplate

pytestmark = pytest.mark.gpu

TOKENS = 4096
CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=1, num_attention_heads=16,
    num_key_value_heads=4, max_position_embeddings=TOKENS,
)  # fmt: skip


def layer(dtype: torch.dtype, compiled: bool, before_backward: Callable[[], None] = lambda: None) -> dict[str, Tensor]:
    """Output, input gradient and weight gradients of one layer on the same values, as fp32."""
    device = torch.device("cuda")
    template = ModelTemplate(CONFIG, device, dtype)
    if compiled:
        template.compile_blocks()
    generator = torch.Generator(device).manual_seed(1)

    def draw(shape: tuple[int, ...], scale: float) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device) * scale
        return values.to(torch.bfloat16).to(dtype)  # the same numbers in both precisions

    tensors = {t.local: t.shape for t in template.spec.blocks[0].tensors}
    weights = {name: draw(shape, 0.03) + (1.0 if len(shape) == 1 else 0.0) for name, shape in tensors.items()}
    ids = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    positions = torch.arange(TOKENS, device=device)
    batch = TokenBatch(ids, positions, ids.to(torch.int32), ids)
    _, calls = template.embed({"embed_tokens.weight": draw((512, 1024), 1.0)}, batch)
    h, dh = draw((1, TOKENS, 1024), 1.0), draw((1, TOKENS, 1024), 1.0)
    grads = {name: torch.zeros(shape, device=device) for name, shape in tensors.items()}
    out = template.block(0, weights, h, calls)
    before_backward()
    dx = block_backward(template, 0, weights, grads, h, calls, dh)
    return {"out": out.float(), "dx": dx.float(), **grads}


def test_compiled_error_is_at_most_a_tenth_above_eager():
    truth, eager, compiled = (
        layer(torch.float32, False), layer(torch.bfloat16, False), layer(torch.bfloat16, True)
    )  # fmt: skip

    def error(found: dict[str, Tensor], name: str) -> float:
        return ((found[name] - truth[name]).norm() / truth[name].norm()).item()

    rows = {name: (error(compiled, name), error(eager, name)) for name in truth}
    print("\n".join(f"{name:40s} compiled {c:.3e}  eager {e:.3e}" for name, (c, e) in rows.items()))
    for name, (of_compiled, of_eager) in rows.items():
        assert 0 < of_compiled <= 1.1 * of_eager, name


def test_compiling_takes_no_pinned_memory_where_hbm_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The compiler times its candidates on copies of what they overwrite, and puts those into pinned RAM where HBM
    never held as much: 1 GiB that no plan knew of."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing was timed before
    torch.compiler.reset()
    torch.cuda.reset_peak_host_memory_stats()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    repeat_bits(True)  # as training by default: reductions are not timed
    try:
        layer(torch.bfloat16, compiled=True, before_backward=torch.cuda.reset_peak_memory_stats)
    finally:
        repeat_bits(False)
    assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] - before < 1 << 20

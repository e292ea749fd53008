"""The Triton kernels of attention: run by Triton's interpreter on the CPU (TRITON_INTERPRET=1), or compiled on a GPU.

Skipped where there is neither. Against the fp64 CPU operator, whose own tests hold it against the formula.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

from megatrain.models import attention_cpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or Triton with TRITON_INTERPRET=1", allow_module_level=True)

from megatrain.models import attention_cuda  # noqa: E402  (imports Triton)

# Under the interpreter numpy warns about the Inf of masked scores, and Triton about numpy.
QUIET = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("RuntimeWarning", "DeprecationWarning")]
pytestmark = QUIET if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"

# name -> (document lengths, query heads, key/value heads, D, E, window, softcap, sinks)
CASES = {
    "plain": ((200,), 2, 1, 64, 64, 0, 0.0, False),
    "packed": ((1, 70, 5, 64, 40, 3), 2, 2, 64, 64, 0, 0.0, False),
    "window": ((150, 20), 4, 2, 64, 64, 33, 0.0, False),
    "window of one": ((90,), 2, 1, 64, 64, 1, 0.0, False),
    "softcap": ((100, 30), 3, 1, 64, 64, 0, 2.0, False),
    "sinks": ((100, 30), 4, 2, 64, 64, 50, 0.0, True),
    "odd sizes": ((7, 120), 2, 1, 80, 24, 40, 1.5, True),
    "one token": ((1,), 2, 1, 64, 64, 0, 0.0, False),
}
if not INTERPRETED:  # several of the larger tiles a GPU takes
    CASES |= {
        "long": ((3000,), 8, 2, 128, 128, 0, 0.0, False),
        "long packed": ((700, 13, 1500, 256, 900), 8, 2, 128, 128, 0, 0.0, True),
        "long window": ((2000, 777), 8, 8, 64, 64, 300, 0.0, True),
        "wide": ((900, 700), 4, 2, 256, 256, 200, 30.0, False),
        "192 and 128": ((1000, 333), 4, 4, 192, 128, 0, 0.0, False),
        "96": ((1100,), 6, 2, 96, 96, 0, 0.0, False),
    }
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
if INTERPRETED:
    TOLERANCE.pop(torch.bfloat16)  # the interpreter multiplies its bit patterns


def _inputs(lengths, heads, groups, size, size_v, sinks, dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)

    def made(h: int, d: int) -> Tensor:
        return torch.randn(1, sum(lengths), h, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)

    ids = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths)).to(DEVICE)
    sink = torch.randn(heads, generator=generator).to(DEVICE, dtype) if sinks else None
    return made(heads, size), made(groups, size), made(groups, size_v), ids, sink, made(heads, size_v).transpose(1, 2)


def _both(
    inputs: tuple[Tensor, ...], scale: float, window: int, softcap: float, tma: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """(ours, truth): out, lse, dq, dk, dv, dsinks."""
    q, k, v, ids, sinks, dout = inputs
    tiles = attention_cuda.TileSet(*(x._replace(tma=tma) for x in attention_cuda.tiles_for(q, v)))
    out, lse = attention_cuda.forward(q, k, v, ids, sinks, scale, window, softcap, tiles.forward)
    ours = [out, lse, *attention_cuda.backward(dout, q, k, v, ids, sinks, out, lse, scale, window, softcap, tiles)]
    wide = [None if x is None else x.detach().cpu().double() for x in (q, k, v, sinks, dout)]
    *qkv, sinks_wide, dout_wide = wide
    want, want_lse = attention_cpu.forward(*qkv, ids.cpu(), sinks_wide, scale, window, softcap)
    gradients = attention_cpu.backward(dout_wide, *qkv, ids.cpu(), sinks_wide, want, want_lse, scale, window, softcap)
    return ours, [want, want_lse, *gradients]


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu_operator(name: str, dtype: torch.dtype, tma: bool) -> None:
    lengths, heads, groups, size, size_v, window, softcap, with_sinks = CASES[name]
    inputs = _inputs(lengths, heads, groups, size, size_v, with_sinks, dtype)
    for ours, truth in zip(*_both(inputs, 0.2, window, softcap, tma), strict=True):
        tolerance = TOLERANCE[dtype] * max(1.0, float(truth.abs().max()) if truth.numel() else 1.0)
        torch.testing.assert_close(ours.cpu().double(), truth, rtol=0, atol=tolerance)


@pytest.mark.parametrize("lengths", [(130,), (90, 38), (700, 300, 24)], ids=str)
def test_slices_at_odd_addresses_are_as_their_copies(lengths: tuple[int, ...]) -> None:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    (_, _, kv, ids, _, _) = _inputs(lengths, 4, 4, 20, 28, False, dtype)
    q, k, _, _, _, dout = _inputs(lengths, 4, 4, 20, 16, False, dtype)
    v = kv[..., 12:]  # 24 bytes into a head of 56
    copies = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for name, (a, b, c) in {"slice": (q, k, v), "copy": copies}.items():
        ours, truth = _both((a, b, c, ids, None, dout), 0.2, 0, 0.0)
        for x, y in zip(ours, truth, strict=True):
            tolerance = TOLERANCE[dtype] * max(1.0, float(y.abs().max()) if y.numel() else 1.0)
            torch.testing.assert_close(x.cpu().double(), y, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    first = attention_cuda.forward(q, k, v, ids, None, 0.2, 0, 0.0)
    for _ in range(1 if INTERPRETED else 20):
        again = attention_cuda.forward(*copies, ids, None, 0.2, 0, 0.0)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_one_id_means_one_document() -> None:
    q, k, v, ids, _, _ = _inputs((90,), 2, 1, 64, 64, False, torch.float32)
    many = attention_cuda.forward(q, k, v, ids, None, 0.2, 0, 0.0)
    one = attention_cuda.forward(q, k, v, ids[:1], None, 0.2, 0, 0.0)
    assert all(torch.equal(x, y) for x, y in zip(many, one, strict=True))


@pytest.mark.parametrize("window", [0, 20])
def test_a_document_does_not_touch_its_neighbours(window: int) -> None:
    inputs = _inputs((70, 33, 60), 2, 1, 64, 64, False, torch.float32)
    first, _ = _both(inputs, 0.2, window, 0.0)
    changed = [x.clone() for x in inputs[:3]] + [inputs[3], None, inputs[5].clone()]
    for x in changed[:3]:
        x[:, :, 70:103] = 9.0
    changed[5][:, 70:103] = -5.0
    second, _ = _both(tuple(changed), 0.2, window, 0.0)
    token_axis = [1, 2, 2, 2, 2]
    for axis, x, y in zip(token_axis, first, second, strict=False):
        assert not torch.equal(x, y)
        for start, stop in ((0, 70), (103, 163)):
            assert torch.equal(x.narrow(axis, start, stop - start), y.narrow(axis, start, stop - start))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("size", [64, 128, 256])
def test_same_bits_in_every_run(size: int) -> None:
    inputs = _inputs((1500, 2596), 8, 2, size, size, False, torch.bfloat16)
    q, k, v, ids, sinks, dout = inputs
    out, lse = attention_cuda.forward(q, k, v, ids, sinks, 0.1, 0, 0.0)
    first = attention_cuda.backward(dout, q, k, v, ids, sinks, out, lse, 0.1, 0, 0.0)
    for _ in range(20):
        again = attention_cuda.backward(dout, q, k, v, ids, sinks, out, lse, 0.1, 0, 0.0)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cudnn_where_bits_need_not_repeat() -> None:
    q, k, v, ids, _, dout = _inputs((2048,), 8, 2, 128, 128, False, torch.bfloat16)
    want, want_lse = attention_cuda.forward(q, k, v, ids[:1], None, 0.1, 0, 0.0)
    got, got_lse = attention_cuda.forward_fast(q, k, v, ids[:1], None, 0.1, 0, 0.0)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-3, atol=1e-3)
    gradients = attention_cuda.backward(dout, q, k, v, ids[:1], None, want, want_lse, 0.1, 0, 0.0)
    fast = attention_cuda.backward_fast(dout, q, k, v, ids[:1], None, got, got_lse, 0.1, 0, 0.0)
    for x, y in zip(gradients, fast, strict=True):
        torch.testing.assert_close(x, y, rtol=5e-2, atol=5e-2)

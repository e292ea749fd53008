"""The Triton update and norm equal optim.spec in every bit: by Triton's interpreter (TRITON_INTERPRET=1) or a GPU."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch

from megatrain.kernels import adamw_fp32_, adamw_split_, tensor_sums
from megatrain.models.layout import Entry, layout_of
from megatrain.models.spec import SegmentSpec, TensorSpec
from megatrain.optim import spec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or Triton with TRITON_INTERPRET=1", allow_module_level=True)

QUIET = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("RuntimeWarning", "DeprecationWarning")]
pytestmark = QUIET if INTERPRETED else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = [0, 1, 3, 255, 256, 257, 1023, 1025, 4097] + ([] if INTERPRETED else [3_000_001])
SCALARS = spec.scalars(spec.AdamW(3e-4, 0.9, 0.95, 1e-8, 0.1), step=3, clip_coefficient=0.37)
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, -3.4028235e38, 1.0, 65504.0],
    dtype=np.float32,
)


def _floats(count: int, seed: int, spread: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 10.0 ** rng.uniform(-spread, spread, count)).astype(np.float32)


def _any_bits(count: int, seed: int) -> np.ndarray:
    """Every kind of fp32 number, the special ones first."""
    values = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    head = np.roll(SPECIAL, seed)[:count]
    values[: len(head)] = head
    return values


def _state(count: int, kind: str) -> tuple[np.ndarray, ...]:
    """(w, m, v, grad)"""
    if kind == "usual":
        return _floats(count, 0), _floats(count, 1), np.abs(_floats(count, 2)), _floats(count, 3)
    if kind == "denormal":
        tiny = np.float32(1e-39)
        return tuple(
            _floats(count, s, 1.0) * tiny if s != 2 else np.abs(_floats(count, s, 1.0) * tiny) for s in range(4)
        )
    return tuple(_any_bits(count, s) for s in range(4))


def _device(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.copy()).to(DEVICE)


def _same(got: torch.Tensor, want: np.ndarray) -> None:
    """Equal bits; two NaNs count as equal."""
    values = got.cpu().numpy()
    both_nan = np.isnan(values) & np.isnan(want)
    width = np.dtype(f"u{values.dtype.itemsize}")
    wrong = (values.view(width) != want.view(width)) & ~both_nan
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size}, first at {wrong.argmax()}: {values[wrong][0]}, {want[wrong][0]}"
    )


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("kind", ["usual", "denormal", "any bits"])
@pytest.mark.parametrize("count", SIZES)
def test_adamw_fp32(count: int, kind: str, decay: bool) -> None:
    given = _state(count, kind)
    w, m, v, grad = map(_device, given)
    adamw_fp32_(w, m, v, grad, SCALARS, decay=decay)
    for got, want in zip((w, m, v), spec.adamw(*given, SCALARS, decay=decay), strict=True):
        _same(got, want)
    _same(grad, given[3])


@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("kind", ["usual", "denormal", "any bits"])
@pytest.mark.parametrize("count", SIZES)
def test_adamw_split(count: int, kind: str, decay: bool) -> None:
    master, *given = _state(count, kind)
    hi, lo = spec.split(master)
    hi_t = _device(hi.view(np.int16)).view(torch.bfloat16)
    lo_t, m, v, grad = map(_device, (lo, *given))
    adamw_split_(hi_t, lo_t, m, v, grad, SCALARS, decay=decay)
    want_hi, want_lo, want_m, want_v = spec.adamw_split(hi, lo, *given, SCALARS, decay=decay)
    _same(m, want_m)
    _same(v, want_v)
    got_hi = hi_t.view(torch.int16).cpu().numpy().view(np.uint16)
    _same(_device(spec.join(got_hi, lo_t.cpu().numpy())), spec.join(want_hi, want_lo))
    hi_is_nan = np.isnan((want_hi.astype(np.uint32) << 16).view(np.float32))
    assert np.array_equal(got_hi[~hi_is_nan], want_hi[~hi_is_nan])
    assert np.isnan((got_hi[hi_is_nan].astype(np.uint32) << 16).view(np.float32)).all()


def test_only_the_given_span_changes() -> None:
    flats = [_device(_floats(700, seed)) for seed in range(4)]
    before = [x.clone() for x in flats]
    adamw_fp32_(*(x[128:515] for x in flats), SCALARS, decay=True)
    for x, y in zip(flats[:3], before[:3], strict=True):
        assert torch.equal(x[:128], y[:128])
        assert torch.equal(x[515:], y[515:])
        assert not torch.equal(x[128:515], y[128:515])


def _entries(shapes: list[tuple[int, ...]]) -> tuple[Entry, ...]:
    tensors = tuple(TensorSpec(f"t{i}", f"t{i}", shape, True, True) for i, shape in enumerate(shapes))
    return layout_of(SegmentSpec("L000", "block", tensors)).entries


SHAPES = [(5, 7), (300,), (1,), (3, 256), (2, 257), (2, 3, 1000), (1, 5000), (600, 2), (4, 1), (0, 3), (7,), (2, 2049)]


@pytest.mark.parametrize("spread", [1.0, 19.0])
def test_sums_of_squares(spread: float) -> None:
    entries = _entries(SHAPES + ([] if INTERPRETED else [(3000, 4097), (100_000,), (3, 700_001)]))
    flat = _floats(entries[-1].offset + entries[-1].tensor.num_elements + 9, 5, spread)
    sums = tensor_sums(_device(flat), entries)
    assert sums.dtype == torch.float64
    want = [spec.tensor_sum_squares(flat[e.offset : e.stop].reshape(e.tensor.shape)) for e in entries]
    _same(sums, np.array(want))


def test_sums_of_squares_that_are_not_finite() -> None:
    entries = _entries([(3, 300), (40,), (3, 5)])
    flat = _floats(entries[-1].stop, 5)
    flat[entries[0].offset + 311] = np.nan
    flat[entries[1].offset + 39] = -np.inf
    sums = tensor_sums(_device(flat), entries).cpu()
    assert sums[0].isnan()
    assert sums[1].isposinf()
    assert sums[2] == spec.tensor_sum_squares(flat[entries[2].offset : entries[2].stop].reshape(3, 5))


def test_no_tensors_no_sums() -> None:
    assert tensor_sums(_device(_floats(4, 0)), ()).shape == (0,)

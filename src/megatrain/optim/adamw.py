"""AdamW over flat spans, in place: one pass that reads and writes every array once. The formula stands in spec.py.

Arrays are 1-D, contiguous and do not overlap; m, v, grad and a full master are float32, hi is uint16 (the bits of a
bf16) and lo int16. `isa` names the kernel set: the best one here unless given, one of `native.isas()`, or "numpy".
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatrain.optim import native, spec
from megatrain.optim.spec import F32, I16, U16, Scalars

# Elements per step of the numpy form: its temporaries stay in the cache.
CHUNK = 1 << 16


def update_fp32(
    w: F32, m: F32, v: F32, grad: F32, scalars: Scalars, *, decay: bool, threads: int, isa: str | None = None
) -> None:
    """One AdamW update of the fp32 master `w` and its moments, in place; weight decay only if `decay`."""
    _check({"w": (w, np.float32), "m": (m, np.float32), "v": (v, np.float32), "grad": (grad, np.float32)}, threads)
    chosen = native.choose(isa)
    if chosen is None:
        for i in range(0, w.size, CHUNK):
            s = slice(i, i + CHUNK)
            w[s], m[s], v[s] = spec.adamw(w[s], m[s], v[s], grad[s], scalars, decay=decay)
    else:
        chosen.module.update_fp32(w, m, v, grad, _constants(scalars, decay), threads, chosen.isa)


def update_split(
    hi: U16, lo: I16, m: F32, v: F32, grad: F32, scalars: Scalars, *, decay: bool, threads: int, isa: str | None = None
) -> None:
    """One AdamW update of the split fp32 master (hi, lo) and its moments, in place; weight decay only if `decay`."""
    arrays: dict[str, tuple[NDArray, DTypeLike]] = {"hi": (hi, np.uint16), "lo": (lo, np.int16)}
    arrays |= {"m": (m, np.float32), "v": (v, np.float32), "grad": (grad, np.float32)}
    _check(arrays, threads)
    chosen = native.choose(isa)
    if chosen is None:
        for i in range(0, hi.size, CHUNK):
            s = slice(i, i + CHUNK)
            hi[s], lo[s], m[s], v[s] = spec.adamw_split(hi[s], lo[s], m[s], v[s], grad[s], scalars, decay=decay)
    else:
        chosen.module.update_split(hi, lo, m, v, grad, _constants(scalars, decay), threads, chosen.isa)


def _constants(scalars: Scalars, decay: bool) -> F32:
    """What the native core takes: multiplying by one changes no weight, so it needs no branch for `decay`."""
    return np.array(scalars if decay else scalars._replace(decay_mul=1.0), np.float32)


def _check(arrays: dict[str, tuple[NDArray, DTypeLike]], threads: int) -> None:
    if threads < 1:
        raise ValueError(f"threads is {threads}; give at least 1")
    sizes = {name: array.size for name, (array, _) in arrays.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"spans of one call differ in length: {sizes}")
    for name, (array, dtype) in arrays.items():
        if array.dtype != dtype or array.ndim != 1:
            raise ValueError(f"{name} is {array.ndim}-D {array.dtype}; it must be 1-D {np.dtype(dtype)}")
        if not array.flags.c_contiguous or not array.flags.aligned:
            raise ValueError(f"{name} has strides {array.strides} bytes; it must be contiguous and aligned")
        if not array.flags.writeable and name != "grad":
            raise ValueError(f"{name} is read-only; it is updated in place")
    for (name, (one, _)), (other_name, (other, _)) in combinations(arrays.items(), 2):
        if np.may_share_memory(one, other):  # compares bounds only: cheap, and exact for contiguous spans
            raise ValueError(f"{name} and {other_name} overlap; every span needs memory of its own")

"""The running average of the masters, in place, on any device. Formula: optim.spec.average."""

from __future__ import annotations

from torch import Tensor

from megatrain.store import join_master

# Elements at a time: temporaries stay in a CPU's caches; on a GPU 8 MiB each, for which a launch is short.
CHUNK_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 21}


def average_(ema: Tensor, w: Tensor, lo: Tensor | None, share: float) -> None:
    """ema += (master - ema) * share in place: ema fp32, all flat and of one size. `lo` None: `w` is the fp32 master.

    Bits of the specification: three elementwise operations, each of which rounds on its own wherever it runs. Queued on
    the current stream.
    """
    size = CHUNK_ELEMENTS[ema.device.type]
    for start in range(0, ema.numel(), size):
        cut = slice(start, start + size)
        master, part = w[cut] if lo is None else join_master(w[cut], lo[cut]), ema[cut]
        part.add_(master.sub(part).mul_(share))

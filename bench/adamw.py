"""CPU AdamW: our kernel (fp32 master; split master) against torch's fused one, interleaved in one process, medians.

Each system updates arrays of its own with random contents; a round runs every system once, so that a machine that slows
down slows all of them. `ratio` is our speed divided by torch's at the same thread count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from bench.results import record
from megatrain import optim

HYPER = optim.AdamW(learning_rate=1e-3, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench adamw", description=__doc__)
    parser.add_argument("--params", type=int, default=1 << 26, help="parameters per system (default 64Mi)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--isa", help="force a kernel set (see megatrain.optim.native.isas)")
    parser.add_argument("--dry-run", action="store_true", help="print, but do not append to bench/results/")
    args = parser.parse_args(argv)
    systems = make_systems(args.params, args.isa)
    for threads in args.threads:
        speeds = measure(systems, args.params, threads, args.rounds)
        for system, gparam_s in speeds.items():
            fields = {
                "system": system,
                "threads": threads,
                "params": args.params,
                "gparam_s": round(gparam_s, 4),
                "ratio": round(gparam_s / speeds["torch-fused"], 3),
            }
            print(fields if args.dry_run else record("adamw", fields))
    return 0


def make_systems(count: int, isa: str | None) -> dict[str, Callable[[int], None]]:
    """System name -> one update of `count` parameters on the given number of threads."""
    rng = np.random.default_rng(0)

    def arrays() -> list[np.ndarray]:
        w, m, g = (rng.standard_normal(count, np.float32) for _ in range(3))
        return [w, m * 0.01, np.square(rng.standard_normal(count, np.float32)) * 1e-4, g * 0.01]

    scalars = optim.scalars(HYPER, 10, 1.0)
    w, m, v, g = arrays()

    def ours_fp32(threads: int) -> None:
        optim.update_fp32(w, m, v, g, scalars, decay=True, threads=threads, isa=isa)

    w2, m2, v2, g2 = arrays()
    hi, lo = optim.split(w2)
    del w2

    def ours_split(threads: int) -> None:
        optim.update_split(hi, lo, m2, v2, g2, scalars, decay=True, threads=threads, isa=isa)

    weight, _, _, grad = (torch.from_numpy(a) for a in arrays())
    parameter = torch.nn.Parameter(weight)
    parameter.grad = grad
    fused = torch.optim.AdamW(
        [parameter],
        lr=HYPER.learning_rate,
        betas=(HYPER.beta1, HYPER.beta2),
        eps=HYPER.epsilon,
        weight_decay=HYPER.weight_decay,
        fused=True,
    )

    def torch_fused(threads: int) -> None:
        torch.set_num_threads(threads)
        fused.step()

    return {"torch-fused": torch_fused, "megatrain-fp32": ours_fp32, "megatrain-split": ours_split}


def measure(systems: dict[str, Callable[[int], None]], count: int, threads: int, num_rounds: int) -> dict[str, float]:
    """Median Gparam/s of each system; the first round warms up and is not counted."""
    times_s: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(num_rounds + 1):
        for name, update in systems.items():
            start = time.perf_counter()
            update(threads)
            times_s[name].append(time.perf_counter() - start)
    return {name: count / statistics.median(times[1:]) / 1e9 for name, times in times_s.items()}

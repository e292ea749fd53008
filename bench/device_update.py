"""AdamW and the norm of gradients on one GPU: ours in Triton against torch's fused AdamW and torch.linalg, in GB/s.

Bytes an element: fp32 AdamW reads w, m, v, grad and writes w, m, v (28); the split form hi, lo, m, v (the same 28);
the norm reads 4.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import triton

from bench.results import record
from megatrain.kernels import adamw_fp32_, adamw_split_, tensor_sums
from megatrain.models.layout import layout_of
from megatrain.models.spec import SegmentSpec, TensorSpec
from megatrain.optim import spec

HYPER = spec.AdamW(learning_rate=1e-4, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)
ATTENTION = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096))
SHAPES = {  # one block of an 8B model, the embedding of one, and the experts of a 120B model's block
    "block": (*ATTENTION, (14336, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,)),
    "embedding": ((128256, 4096),),
    "experts": ((128, 5760, 2880), (128, 2880, 2880)),
}


def update_systems(count: int) -> dict[str, Callable[[], None]]:
    """System name -> one update of `count` parameters."""
    w, m, v, grad = (torch.randn(count, device="cuda") * 1e-2 for _ in range(4))
    v.square_()
    hi, lo = w.bfloat16(), torch.zeros(count, dtype=torch.int16, device="cuda")
    scalars = spec.scalars(HYPER, 10, 0.5)
    step = torch.tensor(10.0, device="cuda")

    def fused() -> None:
        torch._fused_adamw_(
            [w], [grad], [m], [v], [], [step], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    return {
        "adamw fp32": lambda: adamw_fp32_(w, m, v, grad, scalars, decay=True),
        "adamw split": lambda: adamw_split_(hi, lo, m, v, grad, scalars, decay=True),
        "torch fused adamw": fused,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench device_update", description=__doc__)
    parser.add_argument("--params", type=int, default=1 << 28)
    parser.add_argument("--dry-run", action="store_true", help="print, but do not append to bench/results/")
    args = parser.parse_args(argv)
    timed = [(name, args.params, 28, work) for name, work in update_systems(args.params).items()]
    for name, shapes in SHAPES.items():
        tensors = tuple(TensorSpec(f"t{i}", f"t{i}", shape, True, True) for i, shape in enumerate(shapes))
        layout = layout_of(SegmentSpec("L000", "block", tensors))
        grad = torch.randn(layout.num_elements, device="cuda")
        timed.append((f"norm {name}", grad.numel(), 4, lambda g=grad, e=layout.entries: tensor_sums(g, e)))
        timed.append((f"torch norm {name}", grad.numel(), 4, lambda g=grad: torch.linalg.vector_norm(g)))
    for name, count, element_bytes, work in timed:
        ms = triton.testing.do_bench(work, warmup=50, rep=200, return_mode="median")
        row = {
            "system": name,
            "elements": count,
            "ms": round(ms, 4),
            "gb_s": round(count * element_bytes / ms / 1e6, 1),
        }
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if not args.dry_run:
            record("device_update", row, on=torch.cuda.get_device_name().replace(" ", "-"))
    return 0

"""Attention on one GPU: errors against fp64, bits from run to run, and speed; or, with --tune, the best tile sizes.

TFLOP/s count the visible pairs of tokens only: 4 D per pair and head forward, 10 D backward. Systems:
  megatrain       the operator's deterministic kernels
  megatrain-fast  what deterministic: false takes (cuDNN where the case has one document and no extras)
  flex            the framework's FlexAttention, compiled, with the block mask made beforehand
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from bench.results import record
from megatrain.models import attention_cpu, attention_cuda
from megatrain.models.attention_cuda import Tiles, TileSet


@dataclass(frozen=True)
class Case:
    """Documents as lengths; heads; sizes; extras of the scores."""

    name: str
    documents: tuple[int, ...]
    num_heads: int = 32
    num_groups: int = 8
    size: int = 128
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(self.documents)

    @property
    def forward_flops(self) -> int:
        pairs = 0
        for length in self.documents:
            window = min(self.window or length, length)
            pairs += window * (window + 1) // 2 + (length - window) * window
        return 4 * self.size * self.num_heads * pairs


CASES = (
    Case("4K", (4096,)),
    Case("8K", (8192,)),
    Case("16K", (16384,)),
    Case("32K", (32768,)),
    Case("16x1K", (1024,) * 16),
    Case("mixed 16K", (7000, 300, 5000, 37, 2500, 1547)),
    Case("8K window 1K", (8192,), window=1024),
    Case("8K window 128 sinks", (8192,), num_heads=64, size=64, window=128, sinks=True),
    Case("8K sinks", (8192,), num_heads=64, size=64, sinks=True),
    Case("8K softcap", (8192,), softcap=50.0),
    Case("8K 64", (8192,), num_heads=32, size=64),
    Case("8K 256", (8192,), num_heads=16, size=256),
    Case("8K 28/4", (8192,), num_heads=28, num_groups=4),
    Case("8K 96", (8192,), size=96),
)
# block_q, block_k, warps, stages; each is tried with and without TMA
FORWARD_TILES = (
    (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 4, 3),
    (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (128, 32, 8, 3), (64, 32, 4, 3),
)  # fmt: skip
DKDV_TILES = (
    (64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3), (128, 128, 8, 2),
    (64, 64, 8, 2), (64, 64, 8, 1), (32, 64, 8, 2), (32, 128, 4, 3),
)  # fmt: skip
DQ_TILES = (
    (128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 128, 8, 2),
    (128, 64, 4, 3), (64, 32, 4, 3), (64, 64, 8, 2), (128, 32, 8, 2),
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Tensors of one case, bf16; token-major as projections make them."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    ids: Tensor
    sinks: Tensor | None
    numbers: tuple[float, int, float]  # scale, window, softcap


def make_inputs(case: Case) -> Inputs:
    torch.manual_seed(0)

    def made(heads: int) -> Tensor:
        return torch.randn(1, case.num_tokens, heads, case.size, device="cuda", dtype=torch.bfloat16)

    q, k, v = (made(h).transpose(1, 2) for h in (case.num_heads, case.num_groups, case.num_groups))
    numbers = torch.arange(len(case.documents), dtype=torch.int32)
    ids = torch.repeat_interleave(numbers, torch.tensor(case.documents)).cuda()
    one = len(case.documents) == 1
    sinks = torch.randn(case.num_heads, device="cuda", dtype=torch.bfloat16) if case.sinks else None
    return Inputs(
        q, k, v, made(case.num_heads), ids[:1] if one else ids, sinks, (case.size**-0.5, case.window, case.softcap)
    )


Forward = Callable[[], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def systems(x: Inputs) -> Iterator[tuple[str, Forward, Backward]]:
    """(name, forward, backward of its out and lse): the operator's two kernel sets."""
    a = attention_cuda
    for name, forward, backward in (
        ("megatrain", a.forward, a.backward),
        ("megatrain-fast", a.forward_fast, a.backward_fast),
    ):
        yield (
            name,
            lambda f=forward: f(x.q, x.k, x.v, x.ids, x.sinks, *x.numbers),
            lambda out, lse, b=backward: b(x.dout, x.q, x.k, x.v, x.ids, x.sinks, out, lse, *x.numbers),
        )


def flex_system(case: Case, x: Inputs) -> tuple[Callable[[], Tensor], Callable[[Tensor], tuple[Tensor, ...]]] | None:
    """FlexAttention of the case; None where it has sinks or a soft-cap."""
    if case.sinks or case.softcap:
        return None
    ids = x.ids.expand(case.num_tokens)

    def visible(_b: Tensor, _h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        seen = (t >= s) & (ids[t] == ids[s])
        return seen & (t - s < case.window) if case.window else seen

    mask = create_block_mask(visible, None, None, case.num_tokens, case.num_tokens, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)
    leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    dout = x.dout.transpose(1, 2)

    def forward() -> Tensor:
        return compiled(*leaves, block_mask=mask, scale=x.numbers[0], enable_gqa=True)

    return forward, lambda out: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def errors(x: Inputs, results: tuple[Tensor, ...]) -> list[float]:
    """Largest error of out, dq, dk, dv against fp64, each divided by the largest value of the truth."""
    wide = [y.double() for y in (x.q, x.k, x.v)]
    sinks = None if x.sinks is None else x.sinks.double()
    out, lse = attention_cpu.forward(*wide, x.ids, sinks, *x.numbers)
    truth = (out, *attention_cpu.backward(x.dout.double(), *wide, x.ids, sinks, out, lse, *x.numbers))
    return [float((y.double() - z).abs().max() / z.abs().max()) for y, z in zip(results[:4], truth[:4], strict=True)]


def varying(backward: Backward, out: Tensor, lse: Tensor, runs: int = 8) -> int:
    """Elements of the gradients that differ from the first run's in any of `runs`."""
    first = backward(out, lse)
    count = 0
    for _ in range(runs):
        count += sum(int((y != z).sum()) for y, z in zip(first, backward(out, lse), strict=True))
    return count


# Timing calls a backward many times; compiled ones give up their buffers after the first unless told not to.
functorch_config.donated_buffer = False


def _ms(work: Callable[[], object]) -> float:
    return triton.testing.do_bench(work, warmup=30, rep=100, return_mode="median")


def run_case(case: Case, check: bool) -> Iterator[dict[str, object]]:
    x = make_inputs(case)
    for name, forward, backward in systems(x):
        out, lse = forward()
        gradients = backward(out, lse)
        row: dict[str, object] = {"case": case.name, "system": name}
        if check:
            row |= {"errors": [float(f"{e:.1e}") for e in errors(x, (out, *gradients))]}
        row["varying"] = varying(backward, out, lse)
        forward_ms, backward_ms = _ms(forward), _ms(lambda b=backward, o=out, s=lse: b(o, s))
        yield row | _speeds(case, forward_ms, backward_ms)
    flex = flex_system(case, x)
    if flex is not None:
        forward_of, backward_of = flex
        out = forward_of()
        forward_ms, backward_ms = _ms(forward_of), _ms(lambda: backward_of(out))
        yield {"case": case.name, "system": "flex"} | _speeds(case, forward_ms, backward_ms)


def _speeds(case: Case, forward_ms: float, backward_ms: float) -> dict[str, object]:
    tera = case.forward_flops / 1e9
    return {
        "forward_ms": round(forward_ms, 3), "backward_ms": round(backward_ms, 3),
        "forward_tflops": round(tera / forward_ms, 1), "backward_tflops": round(2.5 * tera / backward_ms, 1),
    }  # fmt: skip


def tune(case: Case, try_tma: tuple[bool, ...]) -> None:
    """Time every tile choice of the three kernels on `case` and print them, the best first."""
    x = make_inputs(case)
    small = make_inputs(Case("small", (1024,), case.num_heads, case.num_groups, case.size))
    out, lse = attention_cuda.forward(x.q, x.k, x.v, x.ids, x.sinks, *x.numbers)
    base = attention_cuda.tiles_for(x.q, x.v)

    def backward(y: Inputs, tiles: TileSet, o: Tensor, s: Tensor) -> object:
        return attention_cuda.backward(y.dout, y.q, y.k, y.v, y.ids, y.sinks, o, s, *y.numbers, tiles)

    def choices(kernel: str, y: Inputs, o: Tensor, s: Tensor) -> Iterator[tuple[Tiles, Callable[[], object]]]:
        table = {"forward": FORWARD_TILES, "dkdv": DKDV_TILES, "dq": DQ_TILES}[kernel]
        for numbers in table:
            for tma in try_tma:
                t = Tiles(*numbers, tma)
                if kernel == "forward":
                    yield t, lambda t=t: attention_cuda.forward(y.q, y.k, y.v, y.ids, y.sinks, *y.numbers, t)
                else:
                    yield t, lambda t=t: backward(y, base._replace(**{kernel: t}), o, s)

    small_out, small_lse = attention_cuda.forward(small.q, small.k, small.v, small.ids, small.sinks, *small.numbers)
    for kernel in ("forward", "dkdv", "dq"):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:  # compiles them side by side
            waiting = {t: pool.submit(w) for t, w in choices(kernel, small, small_out, small_lse)}
        fits = {t for t, done in waiting.items() if done.exception() is None}
        times = sorted((_ms(w), t) for t, w in choices(kernel, x, out, lse) if t in fits)
        print(f"{case.name}: {kernel} (of the backward, the other kernel's time included)")
        for ms, tiles in times[:8]:
            print(f"  {ms:8.3f} ms  {tuple(tiles)}")
        for tiles, done in waiting.items():
            if done.exception() is not None:
                print(f"  does not fit: {tuple(tiles)}: {str(done.exception())[:80]}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench attention", description=__doc__)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    parser.add_argument("--tune", action="store_true", help="time tile sizes on the cases instead")
    parser.add_argument("--tma", choices=("both", "yes", "no"), default="both", help="with --tune")
    parser.add_argument("--dry-run", action="store_true", help="print, but do not append to bench/results/")
    args = parser.parse_args(argv)
    gpu = torch.cuda.get_device_name().replace(" ", "-")
    for case in (case for case in CASES if case.name in args.cases):
        if args.tune:
            tune(case, {"both": (True, False), "yes": (True,), "no": (False,)}[args.tma])
            continue
        for row in run_case(case, check=case.num_tokens <= 8192):
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if not args.dry_run:
                record("attention", row, on=gpu)
    return 0

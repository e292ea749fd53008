"""python -m tests.gpu.spread: which kernels give other bits from run to run on this GPU, and by how much.

Two tables, as JSON lines: single kernels on inputs that provoke them, and the gradients of whole tiny models of every
family, with `deterministic: true` (attention "megatrain") and `false` ("megatrain-fast"). `spread` is the largest
difference between two runs, in parts of the root mean square of the result. On a CPU it runs too, for its own test.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from megatrain.errors import ModelError
from megatrain.models import attention
from megatrain.models.batch import TokenBatch
from megatrain.models.cross_entropy import token_losses
from megatrain.models.determinism import repeat_bits
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from tests import reference
from tests.families import CASES, tiny_batch, tiny_buffers, tiny_config, tiny_masters

RUNS = 12
SETTINGS = {True: attention.NAME, False: attention.NAME_FAST}  # deterministic -> attn_implementation
# Operators of the framework whose sums may be taken in another order each time; seen by name in a profile.
SUSPECTS = (
    "index_add", "index_put", "scatter_add", "scatter_reduce", "cumsum", "embedding_dense_backward", "grouped_mm",
    "convolution_backward", "cudnn_attention_backward", "flash_attention_backward", "efficient_attention_backward",
)  # fmt: skip
Kernel = Callable[[], Sequence[Tensor]]


def spread_of(runs: Sequence[Sequence[Tensor]]) -> tuple[int, float]:
    """(different results among `runs`, the largest difference of an element from run 0 in parts of its rms)."""
    first, worst, distinct = runs[0], 0.0, [runs[0]]
    for run in runs[1:]:
        if not any(all(torch.equal(a, b) for a, b in zip(run, known, strict=True)) for known in distinct):
            distinct.append(run)
        for a, b in zip(run, first, strict=True):
            rms = float(b.double().square().mean().sqrt()) or 1.0
            worst = max(worst, float((a.double() - b.double()).abs().max()) / rms)
    return len(distinct), worst


def kernels(device: torch.device, num_tokens: int) -> dict[str, Kernel]:
    """Kernels on inputs with many additions to the same place. "fast:" marks those of `deterministic: false` alone."""
    dice = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice, device=device).to(dtype)

    heads, size, rows = 4, 64, 8
    q, k, v = (random(1, heads, num_tokens, size).requires_grad_() for _ in range(3))
    dout = random(1, num_tokens, heads, size)
    x, w, dy = random(num_tokens, 128).requires_grad_(), random(256, 128).requires_grad_(), random(num_tokens, 256)
    where = torch.randint(0, rows, (num_tokens,), generator=dice, device=device)
    table = random(rows, 128).requires_grad_()
    series, taps = random(1, 128, num_tokens).requires_grad_(), random(128, 1, 4).requires_grad_()
    logits, labels = random(256, 1000).requires_grad_(), torch.randint(0, 1000, (256,), generator=dice, device=device)
    one = torch.zeros(1, dtype=torch.int32, device=device)

    def attend(deterministic: bool) -> Kernel:
        def run() -> Sequence[Tensor]:
            out, _ = attention.attention(q, k, v, one, scale=0.125, deterministic=deterministic)
            return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]

        return run

    def through(function: Callable[[], Tensor], *leaves: Tensor) -> Kernel:
        def run() -> Sequence[Tensor]:
            out = function()
            return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) if leaves else None)]

        return run

    return {
        "attention": attend(True),
        "fast: attention": attend(False),
        "linear, forward and backward": lambda: torch.autograd.grad(functional.linear(x, w), (x, w), dy),
        "embedding, backward": through(lambda: functional.embedding(where, table) * dy[:, :128], table),
        "convolution of each channel, backward": through(
            lambda: functional.conv1d(series, taps, padding=3, groups=128) * 0.5, series, taps
        ),
        "cross-entropy": through(lambda: token_losses(logits.clone(), labels, 0.0), logits),
        "softmax, rms norm": through(lambda: functional.rms_norm(x, (128,)).softmax(-1), x),
        "cumulative sum": lambda: [dy.float().cumsum(0)],
        "framework: index_add": lambda: [torch.zeros(rows, 256, device=device, dtype=dtype).index_add_(0, where, dy)],
        "framework: index_add, fp32": lambda: [torch.zeros(rows, 256, device=device).index_add_(0, where, dy.float())],
        "framework: scatter_add": lambda: [
            torch.zeros(rows, 256, device=device).scatter_add_(0, where[:, None].expand(-1, 256), dy.float())
        ],
        "framework: index_put, accumulate": lambda: [
            torch.zeros(rows, 256, device=device).index_put_((where,), dy.float(), accumulate=True)
        ],
    }


def kernel_rows(device: torch.device, num_tokens: int) -> Iterator[dict[str, Any]]:
    for name, kernel in kernels(device, num_tokens).items():
        runs = [[result.detach().clone() for result in kernel()] for _ in range(RUNS)]
        distinct, spread = spread_of(runs)
        yield {"kernel": name, "runs": RUNS, "distinct": distinct, "spread": spread}


def gradients(
    family: str, deterministic: bool, device: torch.device, num_tokens: int, num_runs: int
) -> tuple[list[dict[str, Tensor]], list[str]]:
    """(the gradients of each of `num_runs` equal passes, suspects among the operators of one more)."""
    config = tiny_config(family, max_position_embeddings=max(num_tokens, 128))
    if device.type == "cuda":
        repeat_bits(deterministic)
    template = ModelTemplate(config, device, torch.bfloat16)
    run = reference.whole(config, torch.bfloat16, SETTINGS[deterministic], device.type)
    weights = {n: reference.compute_weight(m, "bf16") for n, m in tiny_masters(model_spec(config)).items()}
    if template.spec.tied:
        weights[reference.OUTPUT] = weights[reference.embedding_name(config)]
    reference.set_state(run.model, weights, {n: b.to(device) for n, b in tiny_buffers(template).items()})
    batch = TokenBatch(*(tensor.to(device) for tensor in tiny_batch((num_tokens,))))

    def one_pass() -> dict[str, Tensor]:
        sums = {name: torch.zeros(p.shape, device=device) for name, p in run.model.named_parameters()}
        reference.add_gradients(run, batch, sums, 1e-3, 512)
        return sums

    passes = [one_pass() for _ in range(num_runs)]
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        one_pass()
    names = {event.key for event in seen.key_averages()}
    return passes, sorted({suspect for suspect in SUSPECTS for name in names if suspect in name})


def family_row(
    family: str, deterministic: bool, device: torch.device, num_tokens: int, num_runs: int
) -> dict[str, Any]:
    row: dict[str, Any] = {"family": family, "deterministic": deterministic}
    try:
        passes, suspects = gradients(family, deterministic, device, num_tokens, num_runs)
    except (ModelError, RuntimeError, ValueError, TypeError) as error:  # a row says so; the others go on
        return row | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
    varying = [name for name in passes[0] if any(not torch.equal(passes[0][name], other[name]) for other in passes[1:])]
    distinct, spread = spread_of([list(one.values()) for one in passes])
    return row | {
        "runs": num_runs, "distinct": distinct, "spread": spread, "tensors": len(passes[0]), "varying": len(varying),
        "first": varying[:1], "suspects": suspects,
    }  # fmt: skip


def main() -> int:
    """Print, and write to --out."""
    parser = argparse.ArgumentParser("python -m tests.gpu.spread", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("spread.jsonl"))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--families", nargs="*", default=list(CASES), help="default: all; none: kernels only")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    with args.out.open("w", encoding="utf-8") as file:

        def tell(row: dict[str, Any]) -> None:
            file.write(json.dumps(row | {"device": name, "torch": torch.__version__}) + "\n")
            file.flush()
            if row.get("distinct", 2) > 1:
                print(row, flush=True)

        for row in kernel_rows(device, args.tokens):
            tell(row)
        for family in args.families:
            for deterministic in SETTINGS:
                tell(family_row(family, deterministic, device, args.tokens, 4))
    print(f"wrote {args.out}; shown: what varies, or could not be run")
    return 0


if __name__ == "__main__":
    sys.exit(main())

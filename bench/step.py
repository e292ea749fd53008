"""python -m bench step: seconds of a whole optimizer step, streamed by MegaTrain and plain PyTorch in HBM, in one run.

Random weights, random tokens. Systems:
  megatrain            this engine, placed by hand or by the planner: see --systems
  pytorch-hbm          the same layer code, kernels and recompute, everything in HBM (on a CPU: in its memory)
  pytorch-hbm-keep     the same without recompute
One JSON line a system is appended to bench/results/<machine>.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig

from bench.baseline import PlainStep
from bench.placement import COUNTS, PLACES, PLANNED, placed, plan_of, planned
from bench.presets import PRESETS
from bench.results import machine, record
from bench.timing import Pace, empty_cache, fresh, timed
from megatrain.engine import Engine, Numerics
from megatrain.engine.trace import Trace
from megatrain.memory import cap_device_memory, peak_rss_bytes
from megatrain.models.batch import TokenBatch
from megatrain.models.determinism import repeat_bits
from megatrain.models.flops import hardware_flops, train_flops
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from megatrain.optim import AdamW
from megatrain.schedule import Lane
from megatrain.schedule.plan import Plan
from megatrain.store.store import SegmentStore

RANDOM_ELEMENTS = 1 << 26  # drawn at a time; a divisor of a piece of pinned memory
HYPER = AdamW(learning_rate=1e-5, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1)


@dataclass(frozen=True)
class Timing:
    """Seconds of the measured steps, and what they peaked at."""

    steps_s: tuple[float, ...]
    peak_hbm_bytes: int | None
    lanes_s: dict[str, float]
    start_s: float


def measure(step: Callable[[], dict[str, float]], warm_s: float, steps: int) -> Timing:
    """Run `step` once and for at least `warm_s` seconds more, then time `steps` of it."""
    started, start_s, lanes_s = time.perf_counter(), 0.0, dict[str, float]()

    def noted() -> None:
        nonlocal lanes_s
        lanes_s = step()

    def first() -> None:
        nonlocal start_s
        start_s = time.perf_counter() - started

    steps_s = timed(noted, Pace(warm_s, steps, math.inf, least=1), first)
    return Timing(steps_s, used_hbm_bytes(), lanes_s, start_s)


def used_hbm_bytes() -> int | None:
    """Device memory in use, as the driver reports it. Arenas and pool only grow, so after a step it is the peak."""
    if not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def random_batches(vocab: int, tokens: int, sequence: int, count: int, device: torch.device) -> list[TokenBatch]:
    """`count` micro-batches of `tokens` random tokens, packed sequences of `sequence`."""
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        ids = torch.from_numpy(generator.integers(0, vocab, tokens))
        positions = torch.arange(tokens) % sequence
        documents = (torch.arange(tokens) // sequence).to(torch.int32)
        labels = torch.roll(ids, -1)
        labels[sequence - 1 :: sequence] = -100
        batches.append(TokenBatch(*(t.to(device) for t in (ids, positions, documents, labels))))
    return batches


def supervised_of(batches: Sequence[TokenBatch]) -> int:
    """Tokens with a label."""
    return int(sum((batch.labels_T != -100).sum().item() for batch in batches))


def run_megatrain(
    config: PretrainedConfig, args: argparse.Namespace, plan: Plan, batches: Sequence[TokenBatch]
) -> Timing:
    """The engine over random weights."""
    device, dtype = torch.device(args.device), compute_dtype(args)
    template = ModelTemplate(config, device, dtype)
    if not args.eager:
        template.compile_blocks()
    layouts = [layout_of(segment) for segment in template.spec.segments]
    before = time.perf_counter()
    store = SegmentStore(layouts, args.precision, plan, device, Path(args.scratch))
    randomise(store, device)
    empty_cache()  # drawing the weights is no part of a run
    print(f"store: {time.perf_counter() - before:.1f} s", flush=True)
    numerics = Numerics(args.micro_batch_tokens, args.loss_chunk, 1.0)
    engine = Engine(template, store, plan, numerics, device, optimizer_threads=args.threads)
    supervised = supervised_of(batches)

    def step() -> dict[str, float]:
        lanes_s = engine.train_step(batches, supervised, HYPER).lanes_s
        return lanes_s | {"either disk lane": either_s(engine.trace)}

    timing = measure(step, args.warm, args.steps)
    if args.trace:
        engine.trace.write(Path(args.trace))
    engine.close()
    store.close()
    return timing


def either_s(trace: Trace) -> float:
    """Seconds in which the disk was read, written or both: it is one device."""
    rows = sorted(times for op, *times in trace.timed() if op.lane in (Lane.DISK, Lane.DISK_READ))
    busy_s, until_s = 0.0, 0.0
    for start_s, end_s in rows:
        busy_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return busy_s


def randomise(store: SegmentStore, device: torch.device) -> None:
    """Weights N(0, 0.02), norms about 1: drawn on the GPU, 64M at a time, inside a piece of pinned memory."""
    generator = torch.Generator(device).manual_seed(0)
    for name, layout in store.layouts.items():
        with store.visit(name, "w", write=True):
            flat = store.flat(name, "w")
            for entry in layout.entries:
                ones = len(entry.tensor.shape) == 1
                for first in range(entry.offset // RANDOM_ELEMENTS, -(-entry.stop // RANDOM_ELEMENTS)):
                    start, stop = first * RANDOM_ELEMENTS, (first + 1) * RANDOM_ELEMENTS
                    part = flat[max(start, entry.offset) : min(stop, entry.stop)]
                    values = torch.randn(part.numel(), generator=generator, device=device) * 0.02 + ones
                    part.copy_(values.to(part.dtype))


def run_plain(config: PretrainedConfig, args: argparse.Namespace, batches: Sequence[TokenBatch], keep: bool) -> Timing:
    """The same layers in HBM by plain PyTorch."""
    plain = PlainStep(
        config, HYPER, torch.device(args.device), compute_dtype(args), loss_chunk_tokens=args.loss_chunk, keep=keep,
        compiled=not args.eager,
    )  # fmt: skip
    supervised = supervised_of(batches)

    def step() -> dict[str, float]:
        plain.step(batches, supervised)
        return {}

    with closing(plain):
        return measure(step, args.warm, args.steps)


def compute_dtype(args: argparse.Namespace) -> torch.dtype:
    return torch.bfloat16 if args.precision == "bf16" else torch.float32


def load_config(args: argparse.Namespace) -> PretrainedConfig:
    """A preset, or the config.json of a local folder; --layers cuts it."""
    if args.model in PRESETS:
        config = AutoConfig.for_model(**PRESETS[args.model])
    else:
        config = AutoConfig.from_pretrained(args.model)
    if args.layers:
        config.num_hidden_layers = args.layers
        if getattr(config, "layer_types", None):  # a list one entry a layer, for the families that have it
            config.layer_types = config.layer_types[: args.layers]
    return config


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bench step", description=__doc__)
    parser.add_argument("--model", default="llama-3-8b", help=f"one of {', '.join(PRESETS)}, or a model folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens a step")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--loss-chunk", type=int, default=2048)
    parser.add_argument("--hbm-gib", type=float, default=0.0, help="hard cap of the process; 0: none")
    parser.add_argument("--ram-gib", type=float, default=0.0, help="the planner's budget; 0: what is free")
    parser.add_argument("--disk-gib", type=float, default=0.0, help="the planner's budget; 0: what is free")
    parser.add_argument("--machine", default="", help="plan with the rates and sizes of a described machine")
    parser.add_argument(
        "--clip-mode", default="deferred", choices=["deferred", "two-pass"],
        help="two-pass: gradients have no home and are computed twice; a planned system may take it on its own",
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep activations instead of recomputing them")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--grad-slots", type=int, default=2)
    parser.add_argument("--round", type=int, default=0, help="micro-batches a round; 0: all")
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument(
        "--systems",
        default="megatrain,pytorch-hbm",
        help="megatrain may say where state goes: megatrain/resident=EMBED+L000-L003 (or all): its home is HBM; "
        "megatrain/device_update=EMBED: home in RAM, updated on the GPU; megatrain/offload=all: block inputs in RAM; "
        "megatrain/keep_attention=L004-L007 (or all): what attention gives is kept, not computed again; "
        "megatrain/state_disk=L010-L031/weights_disk=L020-L031 (or all): home on disk; "
        "megatrain/planned: as the planner chooses within --hbm-gib, --ram-gib and --disk-gib",
    )
    parser.add_argument("--disk-slots", type=int, default=3, help="landing slots of what lives on disk")
    parser.add_argument("--scratch", default=".", help="folder on the disk to use")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--warm", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trace", default="")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure the systems asked for, one after another, and append a line each."""
    args = parse(argv)
    config = load_config(args)
    device = torch.device(args.device)
    if device.type == "cuda":
        repeat_bits(True)  # for all systems alike, and before the first product
    count = args.tokens // args.micro_batch_tokens
    batches = random_batches(config.vocab_size, args.micro_batch_tokens, args.seq, count, device)
    spec = model_spec(config)
    for system in args.systems.split(","):
        fresh()
        name, _, placement = system.partition("/")
        asked = placed(args, placement)
        if placement == PLANNED:
            asked = planned(spec, asked)
        plan = plan_of(spec, asked, name, len(batches))
        if name == "megatrain":
            if device.type == "cuda" and args.hbm_gib:
                cap_device_memory(int(args.hbm_gib * 2**30))
            timing = run_megatrain(config, asked, plan, batches)
        else:
            timing = run_plain(config, asked, batches, keep=not any(plan.recomputed))
        record("step", row(asked, spec, name, plan, timing, len(batches)), on=machine_name(device))
        torch._dynamo.reset()
    return 0


def machine_name(device: torch.device) -> str:
    """GPU and processor, as the results file is named."""
    name = f"{torch.cuda.get_device_name()}-{machine()}" if device.type == "cuda" else machine()
    return name.replace(" ", "-")


def row(
    args: argparse.Namespace, spec: ModelSpec, system: str, plan: Plan, timing: Timing, count: int
) -> dict[str, object]:
    """The figures of one system. Useful FLOPs: active parameters and causal attention, no recompute."""
    step_s = statistics.median(timing.steps_s)
    documents = [args.seq] * (args.tokens // args.seq)
    hardware = hardware_flops(spec, documents, 0, plan.recomputed, plan.attention_kept, plan.backwards)
    result = {
        "system": system, "model": args.model, "layers": len(spec.blocks),
        "seq_tokens": args.seq, "step_tokens": args.tokens, "micro_batches": count,
        "loss_chunk_tokens": args.loss_chunk, "micro_batch_tokens": args.micro_batch_tokens,
        "hbm_budget_bytes": int(args.hbm_gib * 2**30) or None if system == "megatrain" else None,
        **{key: vars(args)[key] for key in (*PLACES, *COUNTS)}, "clip_mode": plan.clip_mode,
        "activations": "recompute" if any(plan.recomputed) else "keep",
        "predicted_step_s": vars(args).get("predicted_step_s"),
        "precision": args.precision, "deterministic": True, "aliased": False,
        "step_s": step_s, "step_s_min": min(timing.steps_s), "step_s_max": max(timing.steps_s),
        "tokens_per_s": args.tokens / step_s, "model_tflops": train_flops(spec, documents) / step_s / 1e12,
        "hardware_tflops": hardware / step_s / 1e12,
        "peak_hbm_bytes": timing.peak_hbm_bytes, "peak_ram_bytes": peak_rss_bytes(),
        "lanes": timing.lanes_s, "start_s": timing.start_s,
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    return result

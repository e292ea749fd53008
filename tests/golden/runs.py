"""What a golden run is: the same six models, data and steps for ever. A change here makes every committed run void."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers

from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from tests.engine.streamed import Placement, Streamed
from tests.families import tiny_config, tiny_masters

FAMILIES = ("llama", "gemma2", "gpt2", "qwen3_moe", "gpt_oss", "falcon_h1")  # two dense, learned positions, MoE, hybrid
STEPS, MICRO_BATCHES, TOKENS, VOCABULARY = 200, 2, 48, 96
WARMUP_STEPS, PEAK_RATE = 10, 3e-3
PLACEMENT = Placement(round_micro_batches=1, grad_slots=1)  # no placement changes a bit; this one makes all travel
FOLDER = Path(__file__).parent

# One code path in every library on every x86 machine since 2013, and one thread: the framework's own products and sums
# change with instruction set and threads. Read when the libraries load, so a process must start with them.
PINNED = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Run(NamedTuple):
    """`losses`: one a step. `sha256`: over name, w, m and v of every tensor after the last step."""

    losses: list[float]
    sha256: str


def environment(device: str) -> dict[str, str]:
    """What the bits of a run may depend on: its key."""
    if device == "cuda":
        kind = torch.cuda.get_device_name()
    else:
        kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_vendor()}"
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    return {"device": kind, **versions}


def _vendor() -> str:
    """Libraries choose by it; unknown where /proc does not say."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "unknown")


def path_of(key: Mapping[str, str]) -> Path:
    """The file of an environment."""
    words = [key["device"], "torch", key["torch"], "transformers", key["transformers"]]
    return FOLDER / ("-".join("_".join(words).split()) + ".json")


def micro_batch(number: int) -> TokenBatch:
    """Counting in steps of 1 to 5, documents of two lengths: what comes next can be learnt."""
    dice = np.random.default_rng(number)
    cut = int(dice.integers(8, TOKENS - 8))
    ids, positions, documents, labels = [], [], [], []
    for document, length in enumerate((cut, TOKENS - cut)):
        tokens = 3 + (dice.integers(93) + dice.integers(1, 6) * np.arange(length)) % (VOCABULARY - 3)
        ids.append(tokens)
        positions.append(np.arange(length))
        documents.append(np.full(length, document, np.int32))
        labels.append(np.append(tokens[1:], -100))
    return TokenBatch(*(torch.from_numpy(np.concatenate(parts)) for parts in (ids, positions, documents, labels)))


def hyper(step: int) -> AdamW:
    """Warm-up, then a cosine to zero. `step` counts from 0."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return AdamW(PEAK_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / STEPS)), 0.9, 0.95, 1e-8, 0.1)


def train(family: str, device: str, num_steps: int = STEPS) -> Run:
    """The first `num_steps` steps of a golden run: fp32 on a CPU, bf16 on a GPU."""
    config = tiny_config(family)
    masters = tiny_masters(model_spec(config))
    precision = "bf16" if device == "cuda" else "fp32"
    run = Streamed(config, masters, TOKENS, precision=precision, placement=PLACEMENT, device=device)
    losses = []
    try:
        for step in range(num_steps):
            batches = [micro_batch(step * MICRO_BATCHES + k) for k in range(MICRO_BATCHES)]
            losses.append(run.train([batches], [hyper(step)])[0].loss)
        state = run.state()
    finally:
        run.close()
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        for values in state[name]:
            digest.update(values.tobytes())
    return Run(losses, digest.hexdigest())

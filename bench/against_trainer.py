"""`python -m bench against_trainer`: the demo's model trained by MegaTrain and by the Trainer of transformers.

Same rows in the same order, same batch, same hyper-parameters; the loss of every step side by side. Needs
`pip install accelerate` and the demo's files (`python demo/prepare.py`). Runs that --out already has are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from bench.results import machine, versions
from bench.trainer_figure import figure
from megatrain.data import BatchPlan, DataOptions, MicroBatch, prepare

ROOT = Path(__file__).resolve().parents[1]
MODEL, DATA = ROOT / ".demo/smollm2-135m", ROOT / ".demo/train.jsonl"
OUT, FIGURE = ROOT / "bench/results/against_trainer.json", ROOT / "docs/against_trainer.svg"
MAX_LENGTH, ROWS_PER_STEP, WARMUP_STEPS, PEAK_RATE, WEIGHT_DECAY, MAX_NORM = 64, 2, 5, 1e-4, 0.1, 1.0
Weights = Mapping[str, Tensor]


def rows(num_steps: int, cache: Path) -> list[list[dict[str, list[int]]]]:
    """The samples of every step as transformers takes them: labels not shifted, no padding."""
    options = DataOptions(paths=(DATA,), max_length=MAX_LENGTH, cache_dir=cache)
    plan = BatchPlan(
        prepare(options, AutoTokenizer.from_pretrained(MODEL)), max_length=MAX_LENGTH, packing=False,
        train_batch_size=ROWS_PER_STEP, micro_batch_tokens=ROWS_PER_STEP * MAX_LENGTH, seed=0, max_steps=num_steps,
    )  # fmt: skip
    return [[row for batch in plan.step(i).micro_batches for row in samples(batch)] for i in range(num_steps)]


def samples(batch: MicroBatch) -> list[dict[str, list[int]]]:
    """The documents of a micro-batch. Ours says at t what follows t; transformers says at t what t is."""
    found = []
    for document in range(len(batch.sample_ids)):
        here = batch.document_ids_T == document
        labels = np.concatenate([[-100], batch.labels_T[here][:-1]])
        found.append({"input_ids": batch.input_ids_T[here].tolist(), "labels": labels.tolist()})
    return found


def padded(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch, padded at the right."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def filled(name: str, value: int) -> Tensor:
        return torch.tensor([sample[name] + [value] * (longest - len(sample[name])) for sample in samples])

    mask = torch.tensor([[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples])
    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100), "attention_mask": mask}


def by_trainer(num_steps: int, folder: Path, dtype: torch.dtype, autocast: bool) -> tuple[dict[str, Any], Weights]:
    """(losses and norms, final weights) of the Trainer."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype, attn_implementation="sdpa")
    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), per_device_train_batch_size=ROWS_PER_STEP, max_steps=num_steps,
        learning_rate=PEAK_RATE, lr_scheduler_type="linear", warmup_steps=WARMUP_STEPS, weight_decay=WEIGHT_DECAY,
        adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8, max_grad_norm=MAX_NORM, optim="adamw_torch",
        train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=autocast, disable_tqdm=True, remove_unused_columns=False, seed=0,
    )  # fmt: skip
    data = [sample for step in rows(num_steps, folder / "cache") for sample in step]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=padded)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    final = {name: value.detach().float() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    return {"losses": [e["loss"] for e in logged], "grad_norms": [e["grad_norm"] for e in logged]}, final


def by_megatrain(num_steps: int, folder: Path, precision: str) -> tuple[dict[str, Any], Weights]:
    """(losses and norms, final masters) of `megatrain train`."""
    run, exported = folder / "run", folder / "exported"
    settings = {
        "model": MODEL, "dataset": DATA, "output_dir": run, "max_length": MAX_LENGTH, "packing": "false",
        "train_batch_size": ROWS_PER_STEP, "micro_batch_tokens": ROWS_PER_STEP * MAX_LENGTH, "max_steps": num_steps,
        "learning_rate": PEAK_RATE, "lr_scheduler_type": "linear", "warmup_steps": WARMUP_STEPS,
        "weight_decay": WEIGHT_DECAY, "adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": MAX_NORM, "seed": 0,
        "precision": precision, "device": "cpu", "save_steps": num_steps,
    }  # fmt: skip
    config = folder / "run.yaml"
    config.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()), "utf-8")
    program = [sys.executable, "-c", "from megatrain.cli.main import main; main()"]
    subprocess.run([*program, "train", str(config)], check=True)
    subprocess.run([*program, "export", str(run), str(exported), "--dtype", "fp32"], check=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    final: dict[str, Tensor] = {}
    for path in sorted(exported.glob("*.safetensors")):
        final |= load_file(path)
    return {"losses": [s["loss"] for s in steps], "grad_norms": [s["grad_norm"] for s in steps]}, final


RUNS: dict[str, Callable[[int, Path], tuple[dict[str, Any], Weights]]] = {
    "Trainer, fp32": lambda n, folder: by_trainer(n, folder, torch.float32, False),
    "MegaTrain, fp32": lambda n, folder: by_megatrain(n, folder, "fp32"),
    "MegaTrain, bf16, fp32 masters": lambda n, folder: by_megatrain(n, folder, "bf16"),
    "Trainer, bf16 autocast, fp32 weights": lambda n, folder: by_trainer(n, folder, torch.float32, True),
    "Trainer, bf16 weights": lambda n, folder: by_trainer(n, folder, torch.bfloat16, False),
}


def distances(final: Weights, other: Weights, start: Weights) -> dict[str, float]:
    """How far two runs ended apart, in parts of the way that the other has gone; and the way itself."""
    way = sum(float((other[n].double() - start[n].double()).square().sum()) for n in other) ** 0.5
    apart = sum(float((final[n].double() - other[n].double()).square().sum()) for n in other) ** 0.5
    return {"apart": apart / way, "way": way}


def table(result: Mapping[str, Any]) -> str:
    """The table of docs/numerics.md: last loss, the farthest a loss was from the fp32 Trainer's, the weights."""
    first = next(iter(result["runs"].values()))["losses"]
    lines = ["| | last loss | farthest loss | weights apart |", "|---|---|---|---|"]
    for name, run in result["runs"].items():
        worst = max(abs(a - b) for a, b in zip(run["losses"], first, strict=True))
        lines.append(f"| {name} | {run['losses'][-1]:.4f} | {worst:.1e} | {run['apart']:.1e} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run what is missing, write the result, draw the figure."""
    parser = argparse.ArgumentParser("python -m bench against_trainer")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--figure", type=Path, default=FIGURE)
    parser.add_argument("--keep", type=Path, help="a folder for final weights, to go on after a break")
    args = parser.parse_args(argv)
    result = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {}
    if result.get("steps") != args.steps:
        result = {"steps": args.steps, "machine": machine(), "versions": versions(), "runs": {}}
    start = load_file(MODEL / "model.safetensors")
    with tempfile.TemporaryDirectory(prefix="megatrain-trainer-") as scratch:
        kept = args.keep or Path(scratch) / "kept"
        kept.mkdir(parents=True, exist_ok=True)
        for number, (name, run) in enumerate(RUNS.items()):
            if name in result["runs"]:
                continue
            folder = Path(scratch) / str(number)
            folder.mkdir()
            found, final = run(args.steps, folder)
            torch.save({n: v.clone() for n, v in final.items() if n != "lm_head.weight"}, kept / f"{number}.pt")
            first = kept / "0.pt"
            if first.exists():
                found |= distances(torch.load(kept / f"{number}.pt"), torch.load(first), start)
            result["runs"][name] = found
            args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
            print(f"{name}: loss {found['losses'][0]:.4f} -> {found['losses'][-1]:.4f}", flush=True)
    args.figure.write_text(figure(result), "utf-8")
    print(table(result))
    return 0

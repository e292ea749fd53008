"""Run folders made by hand, as a run would leave them: no model is trained for a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from megatrain.config import RunConfig


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    """A row of metrics.jsonl that looks like a real one."""
    decay = math.exp(-step / 60)
    row = {
        "step": step,
        "loss": 2.1 + 1.9 * decay + 0.25 * math.sin(step * 2.3),
        "grad_norm": 1.2 + 4 * decay + 0.4 * math.cos(step * 1.7),
        "lr": 2e-5 * min(1.0, step / 20),
        "applied": True,
        "tokens": 60000 + 37 * step,
        "supervised_tokens": 40000 + 11 * step,
        "step_s": 4.0 + 0.2 * math.sin(step),
        "tokens_per_s": 15000 + 300 * math.sin(step),
        "lanes": {"compute": 3.8, "h2d": 2.9, "d2h": 1.1, "host": 2.2, "disk": 0.0},
        "peak_hbm_bytes": 61 << 30,
        "peak_ram_bytes": 97 << 30,
        "disk_written_bytes": 0,
    }
    return row | changes


def eval_row(step: int, loss: float | str) -> dict[str, Any]:
    """A row of metrics.jsonl about held-out loss."""
    return {"step": step, "eval_loss": loss, "eval_tokens": 51234}


def write_run(path: Path, rows: list[dict[str, Any]], *, saved: tuple[int, ...] = (), **keys: Any) -> Path:
    """A run folder with `rows` as metrics and a manifest for each step in `saved`."""
    path.mkdir(parents=True)
    config = RunConfig(model="/models/Qwen3-8B", dataset="/data/chats.jsonl", **keys)
    (path / "config.yaml").write_text(config.to_yaml())
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in saved:
        folder = path / f"checkpoints/step-{step}"
        (folder / "model").mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"step": step, "files": {"model/a": [[1 << 30, "00"]]}}))
    return path


def write_plan(path: Path) -> None:
    """plan.json and env.json beside it."""
    gib = 1 << 30
    memory = [
        ("weights", "ram", 15), ("optimizer state", "ram", 46), ("gradients", "ram", 31),
        ("shared weight slots", "hbm", 1), ("kept activations of a round", "hbm", 48), ("checkpoints (3)", "disk", 230),
    ]  # fmt: skip
    rows = [{"component": name, "tier": tier, "num_bytes": size * gib} for name, tier, size in memory]
    machine = {"device": "cuda", "device_name": "NVIDIA H200", "ram_total_bytes": 125 * gib, "num_cores": 16}
    plan = {
        "verdict": "FITS",
        "num_parameters": 8190735360,
        "architecture": "Qwen3ForCausalLM",
        "memory": rows,
        "totals": {"hbm": 49 * gib, "ram": 92 * gib, "disk": 230 * gib},
        "budgets": {"hbm": 139 * gib, "ram": 120 * gib, "disk": 800 * gib},
        "peak_phase": "head and loss",
        "machine": machine,
    }
    (path / "plan.json").write_text(json.dumps(plan))
    (path / "env.json").write_text(json.dumps({"megatrain": "0.1.0", "cuda": None, "machine": machine}))


def full_run(path: Path) -> Path:
    """A run of 120 steps with everything a report can show."""
    rows: list[dict[str, Any]] = [eval_row(0, 3.91)]
    for step in range(1, 121):
        rows.append(step_row(step))
        if step % 40 == 0:
            rows.append(eval_row(step, 2.2 + 1.2 * math.exp(-step / 50)))
    write_run(path, rows, saved=(80, 120), max_steps=120, learning_rate=2e-5)
    write_plan(path)
    (path / "report").mkdir()
    samples = [
        {"step": 0, "prompt": "How was your weekend?", "text": "As an AI I have no weekend."},
        {"step": 120, "prompt": "How was your weekend?", "text": "Quiet! I read a book by the lake."},
    ]
    (path / "report/samples.json").write_text(json.dumps({"samples": samples}))
    return path

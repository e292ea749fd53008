"""The model card of an exported checkpoint: what its run recorded, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatrain.config import RunConfig, group_of, yaml_scalar
from megatrain.report.record import Record

Kind = Literal["hf", "dcp"]
PATHS = ("model", "dataset", "eval_dataset", "output_dir")
GROUPS = ("data", "optimisation", "numerics")
LOAD_HF = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```
"""
LOAD_DCP = """```python
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import AutoConfig, AutoModelForCausalLM

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("THIS_FOLDER"), dtype="float32")
optimizer = torch.optim.AdamW(model.parameters())   # after fully_shard(model), if training is to be sharded
weights, state = get_state_dict(model, optimizer)
dcp.load({"model": weights, "optim": state}, checkpoint_id="THIS_FOLDER")
set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
```

Weights are fp32 masters; `exp_avg`, `exp_avg_sq` and `step` are AdamW's. The learning rate in the groups is the peak of
the run's schedule: schedules do not travel, set your own.
"""


def card(record: Record, step: int, manifest: Mapping[str, Any], kind: Kind, weights: str) -> str:
    """Markdown for README.md. Facts come from the run folder and the checkpoint's manifest; no path is told.

    `weights`: what those in this folder are.
    """
    config = record.config
    name = record.path.resolve().name
    rows = [row for row in record.steps if row["step"] <= step]
    facts = [("base model", f"`{Path(config.model).name}` (name of its folder)")]
    if record.plan is not None:
        facts.append(("architecture", f"{record.plan['architecture']}, {record.plan['num_parameters']:,} parameters"))
    facts.append(("trained", _trained(config)))
    facts.append(("optimizer steps", f"{step:,}"))
    if rows:
        tokens = sum(row["tokens"] for row in rows)
        supervised = sum(row["supervised_tokens"] for row in rows)
        facts.append(("tokens trained on", f"{tokens:,}, of which {supervised:,} were predicted"))
        facts.append(("training loss of the last step", _loss(rows[-1]["loss"])))
    facts += _evaluation(record, step)
    facts.append(("weights in this folder", weights))
    facts.append(("data", _data(config)))
    facts.append(("data fingerprint", f"`{manifest['run'].get('data', 'not recorded')}`"))
    versions = ", ".join(f"{key} {value}" for key, value in manifest["versions"].items())
    facts.append(("made with", versions))
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:", "- megatrain", "---"]
    lines += [f"# {name}, step {step:,}", "", "| | |", "|---|---|", *(f"| {key} | {said} |" for key, said in facts)]
    lines += ["", "## Settings", "Those that are not at their defaults.", "", "```yaml", *_settings(config), "```"]
    lines += ["", "## Use", LOAD_HF if kind == "hf" else LOAD_DCP]
    lines += ["## Not recorded", "Licence, languages, intended use and limits: see the base model and the data.", ""]
    return "\n".join(lines)


def _trained(config: RunConfig) -> str:
    masters = f"{config.precision} compute, exact fp32 masters and AdamW state"
    if not config.freeze:
        return f"every parameter, {masters}"
    return f"all parameters but those matching {', '.join(f'`{p}`' for p in config.freeze)}; {masters}"


def _evaluation(record: Record, step: int) -> list[tuple[str, str]]:
    """The eval loss of this very step, and that of the base, where they were measured."""
    losses = {row["step"]: row for row in record.evals}
    facts = []
    if step in losses:
        row = losses[step]
        text = f"{_loss(row['eval_loss'])} over {row['eval_tokens']:,} held-out tokens"
        if 0 in losses:
            text += f" (base model: {_loss(losses[0]['eval_loss'])})"
        facts.append(("eval loss", text))
    return facts


def _data(config: RunConfig) -> str:
    parts = [config.dataset] if isinstance(config.dataset, str) else [part.path for part in config.dataset]
    return ", ".join(f"`{Path(part).name}`" for part in parts)


def _settings(config: RunConfig) -> list[str]:
    defaults = RunConfig(model="-", dataset="-").model_dump(mode="json")
    table = config.model_dump(mode="json")
    return [
        f"{key}: {yaml_scalar(value)}"
        for key, value in table.items()
        if key not in PATHS and group_of(key) in GROUPS and value != defaults[key]
    ]


def _loss(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else str(value)

"""What is printed from RunConfig: the page of keys, the JSON schema for editors, a commented starter. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatrain.config import RunConfig, group_of, yaml_scalar
from megatrain.config_spellings import ALIASES, BATCH_FACTORS


def config_page() -> str:
    """docs/config.md: every key with its default, group and meaning, and the spellings of other tools."""
    defaults = RunConfig(model="-", dataset="-").model_dump(mode="json")
    shapes = RunConfig.model_json_schema()["properties"]
    lines = ["| key | values | default | group | meaning |", "|---|---|---|---|---|"]
    for key, field in RunConfig.model_fields.items():
        shown = "required" if field.is_required() else f"`{yaml_scalar(defaults[key])}`"
        lines.append(f"| `{key}` | {_values(shapes[key])} | {shown} | {group_of(key)} | {field.description} |")
    spellings = ", ".join(f"`{alias}` → `{key}`" for alias, key in ALIASES.items())
    factor = f"`{BATCH_FACTORS[0]}` (or `{BATCH_FACTORS[1]}`) × `{BATCH_FACTORS[2]}` → `train_batch_size`."
    lines += ["", f"Spellings of other tools are accepted and shown under our names: {spellings};", factor]
    return "\n".join(lines) + "\n"


def _values(shape: dict[str, Any]) -> str:
    """The words that a key may have, or the limits of its number; nothing of what is free."""
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    for part in (shape, *shape.get("anyOf", ())):
        if "enum" in part:
            return ", ".join(f"`{word}`" for word in part["enum"])
        limits = [f"{sign} {part[name]:g}" for name, sign in signs.items() if name in part]
        if limits:
            return ", ".join(limits)
    return ""


def config_schema() -> dict[str, Any]:
    """JSON schema of a config file, aliases included, for editors that check YAML while it is typed."""
    schema = RunConfig.model_json_schema()
    keys = schema["properties"]
    for shape in keys.values():
        shape["description"] += f" ({shape.pop('group')})"
        shape.pop("title", None)
    parts = keys["dataset"]["oneOf"][1]
    parts["items"] = {"anyOf": [{"type": "string"}, parts["items"]]}
    keys["freeze"] = _or_one_word(keys["freeze"], {"type": "string"})
    keys["train_roles"] = _or_one_word(keys["train_roles"], {"type": "string"})
    trackers = keys["report_to"]["items"]["enum"]
    keys["report_to"] = _or_one_word(keys["report_to"], {"enum": ["none", *trackers]})
    keys["report_to"]["default"] = "none"
    for alias, key in ALIASES.items():
        keys[alias] = {**keys[key], "description": f"another spelling of {key}"}
    for factor in BATCH_FACTORS:
        keys[factor] = {"type": "integer", "minimum": 1, "description": "a factor of train_batch_size"}
    del schema["required"]  # each may be given under another spelling, or on the command line
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "MegaTrain run"}


def _or_one_word(shape: dict[str, Any], word: dict[str, Any]) -> dict[str, Any]:
    """A list, or its only element without brackets."""
    outer = {key: shape[key] for key in ("default", "description")}
    return {"anyOf": [word, {key: value for key, value in shape.items() if key not in outer}], **outer}


def config_schema_text() -> str:
    """The schema as `megatrain config schema` prints it."""
    return json.dumps(config_schema(), indent=1, ensure_ascii=False)


_STARTER = """\
# A MegaTrain run. Keys left out keep their defaults: docs/config.md lists them all.
# Before it trains:   megatrain plan {path}   ·   megatrain data preview {path}
# To train:           megatrain train {path}
# For your editor:    megatrain config schema > megatrain.schema.json
# yaml-language-server: $schema=megatrain.schema.json

model: {model} # a Hugging Face folder: config.json, safetensors, tokenizer
dataset: {dataset} # messages, ShareGPT, Alpaca, prompt + completion, text; or [{{path: a.jsonl, weight: 2}}, …]
{evaluation}
output_dir: {output_dir} # config, metrics, log and checkpoints; one run owns it

# The batch of one optimizer step: train_batch_size rows of max_length tokens, filled with whole samples.
max_length: {max_length}
packing: true # samples in one row never see each other
train_batch_size: 8
num_train_epochs: 1 # or max_steps: 1000

learning_rate: 1e-5
lr_scheduler_type: cosine # cosine_with_min_lr, linear, constant, warmup_stable_decay
warmup_ratio: 0.03
weight_decay: 0.0
max_grad_norm: 1.0
# freeze: ["embed_tokens", "layers\\.[0-3]\\."] # regular expressions: no gradient, no state, no traffic

save_steps: 500 # saved whole or not at all; Ctrl-C saves too
save_total_limit: 2
logging_steps: 1
# report_to: tensorboard # trackio, wandb; metrics.jsonl is always written

# Where every byte lives is planned from what the machine has. To leave room for others:
# memory: {{hbm: 40GiB, ram: 400GiB, disk: 2TiB}}
"""
_EVALUATED = """\
eval_dataset: {path}
eval_steps: 100 # the checkpoint with the least loss is BEST and is kept; early_stopping_patience: 3 ends the run"""
_NOT_EVALUATED = "# eval_dataset: held_out.jsonl # then: eval_steps: 100, early_stopping_patience: 3"


def starter(model: str, dataset: str, eval_dataset: str | None, path: str, max_length: int = 2048) -> str:
    """A commented config file for a first run; `path` is where it will lie."""
    evaluation = _NOT_EVALUATED if eval_dataset is None else _EVALUATED.format(path=yaml_scalar(eval_dataset))
    return _STARTER.format(
        path=path,
        model=yaml_scalar(model),
        dataset=yaml_scalar(dataset),
        evaluation=evaluation,
        max_length=max_length,
        output_dir=yaml_scalar(f"runs/{Path(path).stem}"),
    )

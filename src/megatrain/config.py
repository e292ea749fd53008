"""What a run was asked to do: from text to a RunConfig, whose keys are in `config_keys`. No torch.

`read_config` turns a YAML file and `key=value` words into a RunConfig; every mistake is a ConfigError with its line and
a suggestion. `resolved` replaces each `auto` once, before step 0.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatrain.config_keys import FREE_GROUPS, RunConfig, group_of
from megatrain.config_spellings import ALIASES, BATCH_FACTORS, did_you_mean, own_names, with_words
from megatrain.config_values import DatasetPart, format_size, what_is_wrong
from megatrain.config_yaml import ConfigValue, parse_mapping, read_bytes
from megatrain.errors import ConfigError

# Numbers that the arithmetic of a step holds in fp32.
FP32_KEYS = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "ema_decay",
    "router_aux_loss_coef",
)
INNER_KEYS = {
    "memory": "memory has hbm, ram, disk, disk_tbw and disk_max_written",
    "dataset": "a dataset has path, format, repeat and weight",
}


def _sentence(detail: ErrorDetails, table: Mapping[str, ConfigValue], source: str) -> str:
    key = str(detail["loc"][0])
    if detail["type"] == "missing" and key not in table:
        return f"{source}: key '{key}' is missing; {RunConfig.model_fields[key].description}"
    loc = detail["loc"][:1] + detail["loc"][2:] if key == "dataset" else detail["loc"]  # [1]: the form of a dataset
    name = ".".join(str(part) for part in loc)
    if detail["type"] == "missing":
        return f"{table[key].where}: {name} is missing"
    if detail["type"] == "extra_forbidden":
        return f"{table[key].where}: unknown key '{name}'; {INNER_KEYS[key]}"
    meaning = f" ({RunConfig.model_fields[key].description})" if detail["type"] == "literal_error" else ""
    return f"{table[key].where}: {name} is {detail['input']!r}; {what_is_wrong(detail)}{meaning}"


def _validated(table: Mapping[str, ConfigValue], source: str) -> RunConfig:
    values = {key: _widened(key, item.value) for key, item in table.items()}
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_sentence(error.errors()[0], table, source)) from None
    for pattern in config.freeze:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"{table['freeze'].where}: freeze has {pattern!r}, not a regular expression: {error}"
            ) from None
    where = {key: item.where for key, item in table.items()}
    _refuse_lost_in_fp32(config, where)
    _refuse_contradictions(config, where)
    return config


def fp32(value: float) -> float:
    """The nearest fp32 number; infinity beyond the largest."""
    return ctypes.c_float(value).value


def _refuse_lost_in_fp32(config: RunConfig, where: Mapping[str, str]) -> None:
    """ConfigError if fp32, which steps compute in, makes another wish of a number: out of its limits, or nothing."""
    values = dict(config)
    for key in where.keys() & set(FP32_KEYS):
        value = values[key]
        if value is None:
            continue
        near = fp32(value)
        try:
            RunConfig.model_validate({**values, key: near})
            limit = "a number that is not 0 would become 0" if near == 0 != value else ""
        except ValidationError as error:
            limit = error.errors()[0]["msg"].lower()
        if limit:
            raise ConfigError(
                f"{where[key]}: {key} is {value!r}, which is {near!r} in fp32, in which steps are computed: {limit}; "
                "give a number that fp32 can tell apart"
            )
    decay = config.learning_rate * config.weight_decay
    if decay and fp32(1.0 - decay) == 1.0:
        least = 2.0**-24 / config.learning_rate
        raise ConfigError(
            f"{where['weight_decay']}: weight_decay is {config.weight_decay!r}; at learning_rate "
            f"{config.learning_rate!r} a step would multiply weights by 1 - {decay:.2g}, which is 1 in fp32: nothing "
            f"would decay; give at least {least:.2g}, or 0"
        )


def _refuse_contradictions(config: RunConfig, where: Mapping[str, str]) -> None:
    """ConfigError if two keys cannot both be honoured."""
    if config.early_stopping_patience is not None and (config.eval_dataset is None or config.eval_steps is None):
        raise ConfigError(
            f"{where['early_stopping_patience']}: early_stopping_patience counts evaluations; set eval_dataset and "
            "eval_steps too"
        )
    if config.save_strategy == "best" and config.eval_dataset is None:
        raise ConfigError(
            f"{where['save_strategy']}: save_strategy is best, but nothing is evaluated; set eval_dataset"
        )
    if config.save_strategy == "no" and config.ema_decay is not None:
        raise ConfigError(
            f"{where['save_strategy']}: save_strategy is no, but only checkpoints hold the average that "
            "ema_decay asks for; leave one of them out"
        )
    if config.warmup_steps and config.warmup_ratio:
        raise ConfigError(f"{where['warmup_ratio']}: warmup_steps and warmup_ratio both size the warm-up; keep one")
    if isinstance(config.dataset, str):
        return
    if any(part.weight is not None for part in config.dataset):
        for part in config.dataset:
            if part.repeat is not None:
                has = f"a repeat ({part.repeat:g}), and weights share this epoch"
            elif part.weight is None:
                has = "no weight, and others have one"
            else:
                continue
            raise ConfigError(f"{where['dataset']}: dataset {part.path} has {has}; give all a weight, or all a repeat")


def _widened(key: str, value: object) -> object:
    """YAML has lists, and bare words for lists of one; RunConfig has tuples. Nothing else is widened."""
    if key in ("freeze", "train_roles") and isinstance(value, str):
        return (value,)
    if key == "report_to" and isinstance(value, str):
        return () if value == "none" else (value,)
    if isinstance(value, list):
        return tuple({"path": item} if key == "dataset" and isinstance(item, str) else item for item in value)
    return value


def read_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The RunConfig of a YAML file (None: of the words alone) with `key=value` overrides; ConfigError on a mistake."""
    if path is None:
        return read_config_text(b"", "command line", overrides)
    return read_config_text(read_bytes(path), str(path), overrides)


def read_config_text(content: bytes, source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """`read_config` of a text; `source` is what mistakes are named by."""
    raw = parse_mapping(content, source)
    return _validated(own_names(with_words(raw, overrides), RunConfig.model_fields), source)


def spellings(path: Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Our key -> how the file or the words spell it, where that is another tool's way."""
    raw = with_words(parse_mapping(read_bytes(path), str(path)), overrides)
    found = {ALIASES[name]: name for name in raw if name in ALIASES}
    factors = [name for name in raw if name in BATCH_FACTORS]
    return found | ({"train_batch_size": " × ".join(factors)} if factors else {})


def resolved(config: RunConfig, device: Literal["cpu", "cuda"], num_cores: int) -> RunConfig:
    """`config` with no `auto` left in its numerics, and paths made absolute. Resolving twice changes nothing."""
    if config.compile and device == "cpu":
        raise ConfigError("compile is true, but the layers run on a CPU; set compile to false")
    if config.clip_mode == "two-pass" and not config.deterministic:
        raise ConfigError(
            "clip_mode is two-pass and deterministic is false: the second pass would use other gradients than those "
            "whose norm was taken; set deterministic to true, or clip_mode to deferred"
        )
    if config.memory.hbm is not None and device == "cpu":
        raise ConfigError(
            f"memory.hbm is {format_size(config.memory.hbm)}, but the layers run on a CPU, where there is no HBM; "
            "leave it out (memory.hbm= on the command line), or set memory.ram"
        )
    step_tokens = config.train_batch_size * config.max_length
    default_tokens = max(min(16384 if device == "cuda" else 2048, step_tokens), config.max_length)
    if config.packing:  # rows are full, so what is left beside the last whole one would be padding
        default_tokens -= default_tokens % config.max_length
    micro_batch_tokens = config.micro_batch_tokens or default_tokens
    if micro_batch_tokens < config.max_length:
        raise ConfigError(
            f"micro_batch_tokens is {micro_batch_tokens}, less than max_length {config.max_length}; "
            f"a row must fit one micro-batch: raise it to at least {config.max_length}"
        )
    precision = config.precision
    if precision == "auto":
        precision = "bf16" if device == "cuda" else "fp32"
    chunk_tokens = config.loss_chunk_tokens or (2048 if device == "cuda" else 512)
    changes = {
        "device": device,
        "precision": precision,
        "compile": device == "cuda" if config.compile is None else config.compile,
        "micro_batch_tokens": micro_batch_tokens,
        "loss_chunk_tokens": min(chunk_tokens, micro_batch_tokens),
        "optimizer_threads": config.optimizer_threads or num_cores,
        "max_grad_norm": config.max_grad_norm or None,
        "model": _absolute(config.model),
        "dataset": _absolute_dataset(config.dataset),
        "eval_dataset": None if config.eval_dataset is None else _absolute(config.eval_dataset),
        "output_dir": str(Path(config.output_dir).absolute()),
    }
    return config.model_copy(update=changes)


def _absolute(path: str) -> str:
    """A path that exists here made absolute; any other name stays as it was written."""
    return str(Path(path).absolute()) if Path(path).exists() else path


def _absolute_dataset(dataset: str | tuple[DatasetPart, ...]) -> str | tuple[DatasetPart, ...]:
    if isinstance(dataset, str):
        return _absolute(dataset)
    return tuple(part.model_copy(update={"path": _absolute(part.path)}) for part in dataset)


def changed_keys(before: RunConfig, after: RunConfig) -> tuple[str, ...]:
    """Keys that may change bits and differ between two resolved configs: what a resume must not find."""
    keys = [key for key in RunConfig.model_fields if group_of(key) not in FREE_GROUPS]
    left, right = before.model_dump(), after.model_dump()
    return tuple(key for key in keys if left[key] != right[key])


def allowed_keys(words: Sequence[str], facts: Collection[str]) -> frozenset[str]:
    """What `--allow` names: keys, under our own names, and `facts` of a run that are no keys; else ConfigError."""
    known = [*RunConfig.model_fields, *facts]
    for word in words:
        if ALIASES.get(word, word) not in known:
            guess = did_you_mean(word, [*known, *ALIASES]) or f"name a key of docs/config.md, or {' or '.join(facts)}"
            raise ConfigError(f"--allow {word}: nothing is called so; {guess}")
    return frozenset(ALIASES.get(word, word) for word in words)


def yaml_scalar(value: object) -> str:
    """One value as flow YAML on one line."""
    return (
        yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
        .removesuffix("\n")
        .removesuffix("\n...")
    )

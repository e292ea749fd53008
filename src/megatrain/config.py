"""RunConfig: what a run was asked to do, as one flat, strict, frozen table of keys. No torch.

`read_config` turns a YAML file and `key=value` words into a RunConfig; every mistake is a ConfigError with its line and
a suggestion. `resolved` replaces each `auto` once, before step 0. `docs/config.md` is printed from RunConfig.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Discriminator, Field, PlainSerializer, Tag, ValidationError
from pydantic_core import ErrorDetails

from megatrain.config_spellings import ALIASES, BATCH_FACTORS, did_you_mean, own_names, with_words
from megatrain.config_values import STRICT, DatasetPart, Memory, format_size, what_is_wrong
from megatrain.config_yaml import ConfigValue, parse_mapping, read_bytes
from megatrain.errors import ConfigError

Group = Literal["run", "data", "optimisation", "numerics", "placement", "output"]
DatasetPath = Annotated[str, Field(min_length=1), Tag("path")]
DatasetParts = Annotated[tuple[DatasetPart, ...], Field(min_length=1), Tag("parts")]
Dataset = Annotated[
    DatasetPath | DatasetParts, Discriminator(lambda value: "parts" if isinstance(value, tuple) else "path")
]
Trackers = Annotated[
    tuple[Literal["tensorboard", "trackio", "wandb"], ...], PlainSerializer(lambda names: list(names) or "none")
]
FREE_GROUPS = ("placement", "output")  # keys of these groups may change at resume
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


def _key(default: Any, group: Group, description: str, **limits: Any) -> Any:
    return Field(default=default, description=description, json_schema_extra={"group": group}, **limits)


class RunConfig(BaseModel):
    """Every key of a run. Groups: `placement` and `output` never change a bit of the result, all others may."""

    model_config = STRICT

    model: str = _key(..., "run", "folder of a Hugging Face model (config.json, safetensors, tokenizer)", min_length=1)
    dataset: Dataset = _key(
        ..., "data", "file or folder of rows, or a list of {path, format, repeat, weight}; formats are detected"
    )
    eval_dataset: str | None = _key(None, "output", "file or folder of held-out rows")
    output_dir: str = _key("runs/run", "output", "the run folder; one run owns it")

    max_length: int = _key(
        2048, "data", "tokens of one row; longer samples are cut; left out: fewer if the model knows fewer", ge=8
    )
    packing: bool = _key(True, "data", "fill rows with several samples, each seeing only itself")
    truncation: Literal["keep_start", "keep_end", "drop"] = _key(
        "keep_start", "data", "what happens to a sample longer than max_length; plain text is cut into rows instead"
    )
    assistant_only_loss: bool = _key(True, "data", "train on the turns of train_roles only; false: on every token")
    train_roles: tuple[str, ...] = _key(("assistant",), "data", "roles whose turns are trained", min_length=1)
    train_batch_size: int = _key(8, "data", "rows of one optimizer step (with packing: rows of max_length)", ge=1)
    num_train_epochs: float = _key(1.0, "optimisation", "passes over the data", gt=0)
    max_steps: int | None = _key(None, "optimisation", "optimizer steps; overrides num_train_epochs", ge=1)
    seed: int = _key(42, "data", "seed of the data order, and of NEFTune's, dropout's and routers' noise", ge=0)

    learning_rate: float = _key(1e-5, "optimisation", "peak learning rate", gt=0)
    lr_scheduler_type: Literal["cosine", "cosine_with_min_lr", "linear", "constant", "warmup_stable_decay"] = _key(
        "cosine", "optimisation", "shape of the learning rate after warm-up"
    )
    min_lr_ratio: float = _key(0.1, "optimisation", "floor of cosine_with_min_lr, as a part of the peak", ge=0, le=1)
    decay_ratio: float = _key(0.1, "optimisation", "last part of warmup_stable_decay that decays", ge=0, le=1)
    warmup_steps: int = _key(0, "optimisation", "steps of linear warm-up", ge=0)
    warmup_ratio: float = _key(
        0.0, "optimisation", "warm-up as a part of all steps; used when warmup_steps is 0", ge=0, le=1
    )
    weight_decay: float = _key(0.0, "optimisation", "decoupled weight decay; never on norms and biases", ge=0)
    adam_beta1: float = _key(0.9, "optimisation", "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = _key(0.999, "optimisation", "AdamW beta 2", ge=0, lt=1)
    adam_epsilon: float = _key(1e-8, "optimisation", "AdamW epsilon", gt=0)
    max_grad_norm: float | None = _key(1.0, "optimisation", "exact global-norm clip; 0 or null: off", ge=0)
    label_smoothing_factor: float = _key(
        0.0, "optimisation", "part of each target spread over the whole vocabulary; evaluation has none", ge=0, lt=1
    )
    neftune_noise_alpha: float | None = _key(
        None, "optimisation", "NEFTune: noise on embeddings while training, 5 is usual; null: none", gt=0
    )
    ema_decay: float | None = _key(
        None,
        "optimisation",
        "decay of a running average of the fp32 masters, 0.999 is usual; `export --ema` writes it; null: none is kept",
        gt=0,
        lt=1,
    )
    router_aux_loss_coef: float | None = _key(
        None, "optimisation", "weight of the routers' balancing loss; null: as the model's config.json asks", ge=0
    )
    freeze: tuple[str, ...] = _key((), "optimisation", "regular expressions; matching parameters are not trained")
    early_stopping_patience: int | None = _key(
        None, "output", "evaluations in a row without a better loss after which the run ends; null: never", ge=1
    )
    early_stopping_threshold: float = _key(0.0, "output", "how much lower a loss must be to count as better", ge=0)
    on_nan: Literal["stop", "skip"] = _key(
        "stop", "optimisation", "what a step with a NaN or Inf does; it never applies"
    )

    precision: Literal["auto", "bf16", "fp32"] = _key(
        "auto", "numerics", "compute precision; masters are exact fp32 in both; auto: bf16 on a GPU, fp32 on a CPU"
    )
    micro_batch_tokens: int | None = _key(
        None,
        "numerics",
        "tokens of one micro-batch; null: 16384 on a GPU, 2048 on a CPU, a step's tokens if fewer",
        ge=8,
    )
    loss_chunk_tokens: int | None = _key(
        None, "numerics", "tokens whose logits exist at one time; null: 2048 on a GPU, 512 on a CPU", ge=1
    )
    deterministic: bool = _key(True, "numerics", "same bits in every run; false: fastest attention kernels")
    compile: bool | None = _key(None, "numerics", "compile the layers; null: on a GPU; refused on a CPU")
    allow_unproven: bool = _key(False, "numerics", "train an architecture that the parity suite does not cover")

    device: Literal["auto", "cpu", "cuda"] = _key("auto", "numerics", "where layers are computed")
    memory: Memory = _key(Memory(), "placement", "budgets, for example {hbm: 40GiB, ram: 400GiB}")
    activations: Literal["auto", "recompute", "keep"] = _key(
        "auto", "placement", "keep a layer's saved tensors, or compute them again in the backward"
    )
    weight_slots: int | None = _key(None, "placement", "shared weight slots (advanced)", ge=2)
    round_micro_batches: int | None = _key(
        None, "placement", "micro-batches that go through the layers together (advanced)", ge=1
    )
    optimizer_threads: int | None = _key(None, "placement", "threads of the CPU update; null: every core", ge=1)
    clip_mode: Literal["auto", "deferred", "two-pass"] = _key(
        "auto",
        "placement",
        "exact clipping: deferred: gradients wait for their norm, 4 bytes a parameter; two-pass: computed twice",
    )

    logging_steps: int = _key(1, "output", "steps between two printed lines; metrics.jsonl has every step", ge=1)
    eval_steps: int | None = _key(None, "output", "steps between two evaluations; null: only before and after", ge=1)
    save_steps: int = _key(500, "output", "steps between two checkpoints; the last step is always saved", ge=1)
    save_total_limit: int = _key(2, "output", "checkpoints kept, beside the best one that was evaluated", ge=2)
    save_strategy: Literal["steps", "best", "no"] = _key(
        "steps",
        "output",
        '"best": also at each evaluation better than all before; "no": nothing can be resumed; '
        "only the final model is written",
    )
    resume_from_checkpoint: Literal["auto", "never"] = _key(
        "auto", "output", "auto: go on from the newest valid checkpoint in output_dir, if there is one"
    )
    report_to: Trackers = _key(
        (), "output", "none, or some of tensorboard, trackio, wandb; metrics.jsonl is always written"
    )
    run_name: str | None = _key(None, "output", "the run's name in trackers; null: that of output_dir", min_length=1)

    def to_yaml(self) -> str:
        """The whole table as YAML that `read_config` reads back to an equal RunConfig."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def group_of(key: str) -> str:
    """The group of a key of RunConfig."""
    extra = RunConfig.model_fields[key].json_schema_extra
    assert isinstance(extra, dict), f"{key} was not declared with _key"
    return str(extra["group"])


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
    raw = with_words(parse_mapping(path.read_bytes(), str(path)), overrides)
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
    default_tokens = min(16384 if device == "cuda" else 2048, step_tokens)
    micro_batch_tokens = config.micro_batch_tokens or max(default_tokens, config.max_length)
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

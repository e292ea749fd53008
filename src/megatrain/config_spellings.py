"""Names of keys: other tools' spellings, `key=value` words, what is said of names with no place here. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

from megatrain.config_yaml import ConfigValue, parse_value
from megatrain.errors import ConfigError

ALIASES = {
    "model_name_or_path": "model",
    "base_model": "model",
    "model_id": "model",
    "dataset_path": "dataset",
    "train_file": "dataset",
    "train_dataset": "dataset",
    "validation_file": "eval_dataset",
    "val_dataset": "eval_dataset",
    "cutoff_len": "max_length",
    "sequence_len": "max_length",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "sample_packing": "packing",
    "roles_to_train": "train_roles",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "adam_eps": "adam_epsilon",
    "max_norm": "max_grad_norm",
    "gradient_clipping": "max_grad_norm",
    "label_smoothing": "label_smoothing_factor",
    "neftune_alpha": "neftune_noise_alpha",
    "moe_aux_loss_coef": "router_aux_loss_coef",
    "output_path": "output_dir",
    "global_batch_size": "train_batch_size",
}
BATCH_FACTORS = ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
CODE_KEYS = ("trust_remote_code", "plugins", "custom_generate", "remote_code")

_PRECISION = "precision: bf16 or fp32 says what layers compute in; masters are exact fp32 in both"
_WHOLE = "MegaTrain trains every parameter; `freeze` leaves some out"
_AVERAGE = "ema_decay: 0.999 keeps an average of the weights; export --ema writes it"
_SINGLE = "one process owns one GPU and the host's memory; there is nothing to shard"
# Key of another tool -> what to do instead. It is still an error: a wish that is not honoured is never passed over.
HINTS = {
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "tf32": _PRECISION,
    "finetuning_type": _WHOLE,
    "adapter": _WHOLE,
    "lora_r": _WHOLE,
    "lora_rank": _WHOLE,
    "load_in_8bit": _WHOLE,
    "load_in_4bit": _WHOLE,
    "weight_ema": _AVERAGE,
    "use_ema": _AVERAGE,
    "deepspeed": _SINGLE,
    "fsdp": _SINGLE,
    "fsdp_config": _SINGLE,
    "gradient_checkpointing": "activations: auto decides; activations: recompute is what it means",
    "train_on_inputs": "assistant_only_loss: false trains on prompts too",
    "train_on_prompt": "assistant_only_loss: false trains on prompts too",
    "load_best_model_at_end": "BEST in the run folder names the best checkpoint; export it with --step best",
    "metric_for_best_model": "the best checkpoint is the one with the least loss on eval_dataset",
    "val_set_size": "name held-out rows with eval_dataset; MegaTrain splits no file",
    "val_size": "name held-out rows with eval_dataset; MegaTrain splits no file",
    "datasets": "dataset takes a list too: [{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]",
    "optim": "the optimizer is AdamW with fp32 state; adam_beta1, adam_beta2 and adam_epsilon set it",
    "optimizer": "the optimizer is AdamW with fp32 state; adam_beta1, adam_beta2 and adam_epsilon set it",
}


def refuse_unknown(key: str, where: str, known: Collection[str]) -> None:
    """ConfigError for a name that is none of our `known` keys, with what is meant, as far as it can be guessed."""
    if key in CODE_KEYS:
        raise ConfigError(f"{where}: key '{key}' is refused: MegaTrain runs no code named by a file; remove the key")
    if key in HINTS:
        raise ConfigError(f"{where}: key '{key}' has no place here: {HINTS[key]}")
    guess = did_you_mean(key, [*known, *ALIASES, *BATCH_FACTORS])
    raise ConfigError(f"{where}: unknown key '{key}'; {guess or 'docs/config.md lists the keys'}")


def did_you_mean(word: str, known: Collection[str]) -> str:
    """ "did you mean 'learning_rate'?", or nothing where no known word is near."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else ""


def keys_of(words: Sequence[str]) -> set[str]:
    """The keys, under our own names, that `key=value` words set."""
    names = (word.partition("=")[0].partition(".")[0] for word in words)
    return {"train_batch_size" if name in BATCH_FACTORS else ALIASES.get(name, name) for name in names}


def own_names(raw: Mapping[str, ConfigValue], known: Collection[str]) -> dict[str, ConfigValue]:
    """The same table under our own names, all of them `known`. Two spellings of one key are an error."""
    table: dict[str, ConfigValue] = {}
    factors: dict[str, ConfigValue] = {}
    for name, item in raw.items():
        key = ALIASES.get(name, name)
        if name in BATCH_FACTORS:
            factors[name] = item
            continue
        if key not in known:
            refuse_unknown(name, item.where, known)
        if key in table:
            raise ConfigError(f"{item.where}: '{name}' and a line before it both set '{key}'; keep one")
        table[key] = item
    if factors:
        _multiply_factors(table, factors)
    return table


def _multiply_factors(table: dict[str, ConfigValue], factors: Mapping[str, ConfigValue]) -> None:
    """per_device_train_batch_size (or micro_batch_size) × gradient_accumulation_steps = train_batch_size."""
    where = next(iter(factors.values())).where
    if "train_batch_size" in table:
        raise ConfigError(f"{where}: '{next(iter(factors))}' and 'train_batch_size' both size the batch; keep one")
    if len(factors.keys() & set(BATCH_FACTORS[:2])) != 1:
        raise ConfigError(
            f"{where}: give train_batch_size, or per_device_train_batch_size × gradient_accumulation_steps"
        )
    product = 1
    for name, item in factors.items():
        if not isinstance(item.value, int) or isinstance(item.value, bool) or item.value < 1:
            raise ConfigError(f"{item.where}: {name} is {item.value!r}; it must be a whole number of at least 1")
        product *= item.value
    table["train_batch_size"] = ConfigValue(product, where)


def with_words(raw: dict[str, ConfigValue], words: Sequence[str]) -> dict[str, ConfigValue]:
    """`key=value` words replace what the file says; `memory.hbm=24GiB` reaches into memory."""
    own_name = {ALIASES.get(name, name): name for name in raw}
    for word in words:
        name, equals, text = word.partition("=")
        where = f"command line '{word}'"
        if not equals or not name:
            raise ConfigError(f"{where}: write key=value, for example learning_rate=2e-5")
        value = parse_value(text, where)
        if name.startswith("memory."):
            before = raw["memory"].value if "memory" in raw else {}
            if not isinstance(before, dict):
                raise ConfigError(f"{raw['memory'].where}: memory is {before!r}; write {{hbm: …, ram: …}}")
            name, value = "memory", {**before, name.removeprefix("memory."): value}
        key = ALIASES.get(name, name)
        if key in own_name:
            raw.pop(own_name[key], None)
        if key == "train_batch_size":
            for factor in BATCH_FACTORS:
                raw.pop(factor, None)
        own_name[key] = name
        raw[name] = ConfigValue(value, where)
    return raw

"""Translation: the table that an importer fills, and the keys that all tools built on transformers share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from megatrain.config_spellings import HINTS

SAME = (
    "learning_rate",
    "max_steps",
    "seed",
    "output_dir",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "logging_steps",
    "early_stopping_patience",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "run_name",
)
SCHEDULERS = ("linear", "cosine", "constant", "cosine_with_min_lr", "warmup_stable_decay")
PLANNED = "where things are computed and kept is planned; see `megatrain plan`"
OWN_TEMPLATE = "conversations are rendered by the tokenizer's own chat template"
TRACKERS = ("tensorboard", "trackio", "wandb")
# Wishes about how a run is carried out: its result is the same without them.
CARRIED_OUT = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "ddp_timeout", "local_rank"), HINTS["fsdp"]),
    **dict.fromkeys(
        ("gradient_checkpointing", "gradient_checkpointing_kwargs", "disable_gradient_checkpointing"), PLANNED
    ),
    **dict.fromkeys(("flash_attn", "flash_attention", "xformers_attention", "sdp_attention", "use_unsloth",
                     "enable_liger_kernel", "attn_implementation", "use_unsloth_gc"),
                    "attention is one operator of MegaTrain's own; `deterministic` chooses its kernels"),
    **dict.fromkeys(("preprocessing_num_workers", "dataloader_num_workers", "dataset_processes", "overwrite_cache",
                     "dataset_prepared_path", "tokenized_path", "dataloader_pin_memory"),
                    "tokens are made once, kept by content, and read as they are needed"),
    **dict.fromkeys(("overwrite_output_dir", "plot_loss", "do_train", "do_eval", "model_type", "tokenizer_type",
                     "use_fast_tokenizer", "strict", "debug", "save_safetensors", "is_llama_derived_model"),
                    "nothing to set: this is how MegaTrain works, or not needed"),
    **dict.fromkeys(("group_by_length", "pad_to_sequence_len"),
                    "micro-batches are filled by tokens; their shapes repeat"),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size"),
                    "an evaluation uses the micro-batches of training"),
}  # fmt: skip


@dataclass
class Translation:
    """`keys`: ours, as they will be written. `lost`: what was asked for and is not carried over, with the reason.

    `given` shrinks as keys are taken; what is left at the end was not understood.
    """

    given: dict[str, object]
    keys: dict[str, object] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, default: object = None) -> object:
        """The value of a key, taken out; `default` if it is not there or empty."""
        value = self.given.pop(name, None)
        return default if value is None else value

    def put(self, key: str, value: object) -> None:
        """Set one of our keys, if there is a value."""
        if value is not None:
            self.keys[key] = value

    def lose(self, name: str, reason: str) -> None:
        """Say that `name` is not carried over; nothing to say if it was not given or asks for nothing."""
        value = self.take(name)
        if value not in (None, False, 0, "", "none", "no"):
            self.lost[f"{name}: {value}"] = reason

    def lose_all(self, reasons: Mapping[str, str]) -> None:
        """`lose` for a table of them."""
        for name, reason in reasons.items():
            self.lose(name, reason)

    def lose_rest(self, prefixes: Mapping[str, str]) -> None:
        """What nobody took; `prefixes` give families of keys a reason."""
        for name in list(self.given):
            family = next((reason for prefix, reason in prefixes.items() if name.startswith(prefix)), None)
            self.lose(name, family or HINTS.get(name) or "MegaTrain has no such key")


def take_common(it: Translation) -> None:
    """Keys that mean the same in every tool built on transformers' Trainer."""
    for key in SAME:
        it.put(key, it.take(key))
    if it.keys.get("max_steps", 1) == -1:
        del it.keys["max_steps"]
    _take_schedule(it)
    _take_saving(it)
    _take_precision(it)
    optimizer = str(it.take("optim") or it.take("optimizer") or "adamw")
    if "8bit" in optimizer or "4bit" in optimizer or not optimizer.startswith(("adamw", "paged_adamw")):
        it.lost[f"optimizer: {optimizer}"] = "the optimizer is AdamW with exact fp32 state"
    it.lose("trust_remote_code", "MegaTrain runs no code named by a file")
    it.lose("resume_from_checkpoint", "a run goes on from the newest valid checkpoint in its own output_dir")
    it.lose_all(CARRIED_OUT)


def _take_schedule(it: Translation) -> None:
    kind = str(it.take("lr_scheduler_type") or it.take("lr_scheduler") or "linear")
    warmup_steps, warmup_ratio = it.take("warmup_steps", 0), it.take("warmup_ratio", 0)
    settings = it.take("lr_scheduler_kwargs", {})
    if isinstance(settings, dict) and "min_lr_rate" in settings:
        it.put("min_lr_ratio", settings["min_lr_rate"])
    elif settings:
        it.lost[f"lr_scheduler_kwargs: {settings}"] = "set min_lr_ratio or decay_ratio instead"
    ratio = it.take("cosine_min_lr_ratio")
    if kind == "cosine" and ratio is not None:
        kind = "cosine_with_min_lr"
        it.put("min_lr_ratio", ratio)
    if kind == "constant" and (warmup_steps or warmup_ratio):
        it.lost["warm-up"] = "lr_scheduler_type constant has none in transformers (constant_with_warmup has)"
        warmup_steps = warmup_ratio = 0
    if kind == "constant_with_warmup":
        kind = "constant"
    if kind not in SCHEDULERS:
        it.lost[f"lr_scheduler_type: {kind}"] = f"use one of {', '.join(SCHEDULERS)}; cosine is written"
        kind = "cosine"
    it.put("lr_scheduler_type", kind)
    it.put("warmup_steps", warmup_steps or None)
    it.put("warmup_ratio", None if warmup_steps else warmup_ratio or None)


def _take_saving(it: Translation) -> None:
    strategy, limit = it.take("save_strategy", "steps"), it.take("save_total_limit")
    if strategy in ("no", "best", "steps"):
        it.put("save_strategy", strategy)
    else:
        it.lost[f"save_strategy: {strategy}"] = "checkpoints are counted in steps; set save_steps"
    steps = it.take("save_steps")
    it.put("save_steps", _steps_of(it, "save_steps", steps))
    if isinstance(limit, int) and limit < 2:
        it.lost[f"save_total_limit: {limit}"] = "at least two checkpoints are kept, so that a crash cannot cost both"
        limit = 2
    it.put("save_total_limit", limit)
    evaluation = it.take("eval_strategy") or it.take("evaluation_strategy")
    steps = _steps_of(it, "eval_steps", it.take("eval_steps"))
    if evaluation == "epoch":
        it.lost["eval_strategy: epoch"] = "evaluations are counted in steps; set eval_steps"
    elif evaluation != "no":
        it.put("eval_steps", steps)
    it.lose("load_best_model_at_end", HINTS["load_best_model_at_end"])
    it.lose("metric_for_best_model", HINTS["metric_for_best_model"])
    it.lose("saves_per_epoch", "checkpoints are counted in steps; set save_steps")
    it.lose("evals_per_epoch", "evaluations are counted in steps; set eval_steps")


def _steps_of(it: Translation, name: str, steps: object) -> object:
    """A whole number of steps; a share of the run is not carried over."""
    if isinstance(steps, float):
        it.lost[f"{name}: {steps}"] = f"steps are counted, not shares of the run; set {name}"
        return None
    return steps


def _take_precision(it: Translation) -> None:
    if it.take("bf16") or it.take("pure_bf16"):
        it.put("precision", "bf16")
    it.lose("fp16", "layers compute in bf16 or fp32, see `precision`; there is no loss scaling")
    it.lose("tf32", "fp32 means fp32")


def take_trackers(it: Translation, asked: object) -> None:
    """`report_to` as transformers takes it: a name, a list, none or all."""
    names: Iterable[object] = asked if isinstance(asked, list) else [asked]
    known = [name for name in names if name in TRACKERS]
    for name in names:
        if name not in (*TRACKERS, None, "none", "all"):
            it.lost[f"report_to: {name}"] = f"trackers are {', '.join(TRACKERS)}; metrics.jsonl is always written"
    it.put("report_to", known or None)


def batch_of(it: Translation, per_device: str, default: int) -> None:
    """Rows of a step on one device; what other devices added is said."""
    rows, factor = it.take(per_device, default), it.take("gradient_accumulation_steps", 1)
    if isinstance(rows, int) and isinstance(factor, int):
        it.put("train_batch_size", rows * factor)
        it.lost["number of GPUs"] = (
            f"if the run had several, multiply train_batch_size ({rows * factor}) by their number"
        )

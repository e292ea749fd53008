"""Other tools' spellings of our keys, and what is said of keys that have no place here. No torch."""

from __future__ import annotations

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
    "output_path": "output_dir",
    "global_batch_size": "train_batch_size",
}
BATCH_FACTORS = ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
CODE_KEYS = ("trust_remote_code", "plugins", "custom_generate", "remote_code")

_PRECISION = "precision: bf16 or fp32 says what layers compute in; masters are exact fp32 in both"
_WHOLE = "MegaTrain trains every parameter; `freeze` leaves some out"
_AVERAGE = "averages of the weights (EMA) are not kept yet; take a later checkpoint, or average exported folders"
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
    "ema_decay": _AVERAGE,
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

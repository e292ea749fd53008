"""The paper's own code: https://github.com/DLYuanGod/MegaTrain, its `examples/configs/*.yaml`: sections of keys."""

from __future__ import annotations

from pathlib import Path

from megatrain.importers.translation import PLANNED, Translation

SECTIONS = ("model", "dataset", "training", "optimizer", "memory", "logging", "vlm")


def translate(it: Translation, _folder: Path) -> None:
    """Fill `it` from a config of the paper's code. Its defaults that differ from ours are written out."""
    flat = {
        f"{section}.{key}": value
        for section in SECTIONS
        if isinstance(table := it.take(section), dict)
        for key, value in table.items()
    }
    it.given.update(flat)
    it.put("model", it.take("model.name"))
    path, name = it.take("dataset.path"), it.take("dataset.name")
    it.put("dataset", path or name)
    if not path and name:
        it.lost[f"dataset.name: {name}"] = (
            "a name of dataset_info.json, not a file: put the path of its file or folder in its place"
        )
    it.put("max_length", it.take("dataset.max_seq_len", 1024))
    it.put("packing", False)
    it.put("assistant_only_loss", not it.take("dataset.train_on_prompt", False))
    rows, factor = it.take("training.batch_size", 96), it.take("training.gradient_accumulation_steps", 1)
    passes = it.take("training.num_steps", 100)
    if isinstance(rows, int) and isinstance(factor, int) and isinstance(passes, int):
        it.put("train_batch_size", rows * factor)
        it.put("max_steps", max(1, passes // factor))  # num_steps counts batches, accumulated ones too
    it.put("learning_rate", it.take("training.learning_rate", 1e-5))
    it.put("lr_scheduler_type", "constant")
    it.put("weight_decay", it.take("training.weight_decay", 0.01))
    it.put("max_grad_norm", it.take("training.max_grad_norm", 1.0))
    it.put("seed", it.take("training.seed", 42))
    for ours, theirs in (("adam_beta1", "beta1"), ("adam_beta2", "beta2"), ("adam_epsilon", "eps")):
        it.put(ours, it.take(f"optimizer.{theirs}"))
    it.put("logging_steps", it.take("logging.log_interval"))
    _lose_what_is_planned(it)
    it.lost["weight decay on norms and biases"] = "MegaTrain decays neither"
    it.lost["rows in file order"] = "MegaTrain shuffles them, anew each epoch, by `seed`"
    it.lose_rest({"vlm.": "images are planned, not there yet", "dataset.": "rows are read by the usual keys"})


def _lose_what_is_planned(it: Translation) -> None:
    """How the run is carried out."""
    dtype = it.take("model.dtype", "bfloat16")
    if dtype == "float32":
        it.put("precision", "fp32")
    elif dtype == "float16":
        it.lost["model.dtype: float16"] = "layers compute in bf16 or fp32, see `precision`; there is no loss scaling"
    else:
        it.put("precision", "bf16")
    devices = it.take("model.devices", [it.take("model.device", 0)])
    if isinstance(devices, list) and len(devices) > 1:
        it.lost[f"model.devices: {devices}"] = "one process, one GPU; train_batch_size is already that of all together"
    it.lose("model.attn_implementation", "attention is one operator of MegaTrain's own")
    it.lose("model.trust_remote_code", "MegaTrain runs no code named by a file")
    it.lose("optimizer.type", "AdamW with exact fp32 state, with these numbers")
    for key in ("memory.checkpoint_interval", "memory.num_grad_slabs"):
        it.lose(key, PLANNED)
    it.lose("logging.enable_timing", "the time of every lane is always measured")
    it.lose("dataset.num_workers", "tokens are made once, kept by content, and read as they are needed")

"""Axolotl: https://github.com/axolotl-ai-cloud/axolotl, its `examples/*/*.yaml`."""

from __future__ import annotations

import re
from pathlib import Path

from megatrain.config_spellings import HINTS
from megatrain.importers.translation import OWN_TEMPLATE, Translation, batch_of, take_common, take_trackers

NO_ADAPTER = (
    "every parameter is trained; a learning rate that suits an adapter is usually ten times too high for all of them"
)
PREFIXES = {
    "lora_": NO_ADAPTER,
    "peft_": NO_ADAPTER,
    "liger_": "layers are the model's own code; the loss is computed in chunks anyway",
    "wandb_": "the run's name is run_name; the rest is set by wandb's own environment variables",
    "eval_": "held-out loss is what is evaluated",
    "rl": "preference training is planned, not there yet",
}
FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "completion": "text"}
HUB_NAME = re.compile(r"[\w.-]+/[\w-]+")  # a dataset of the hub, which is fetched; a file has a suffix
USUAL_KEYS = {
    "field_messages": ("messages", "conversations"),
    "message_field_role": ("role", "from"),
    "message_field_content": ("content", "value"),
    "field_instruction": ("instruction",),
    "field_input": ("input",),
    "field_output": ("output",),
}
KNOWN_IN_DATASET = ("path", "type", "data_files", "split", "ds_type", "roles_to_train", "train_on_eos")


def translate(it: Translation, folder: Path) -> None:
    """Fill `it` from an Axolotl file in `folder`. Its defaults that differ from ours are written out."""
    it.put("model", it.take("base_model"))
    parts = [_part(it, entry, folder) for entry in _list(it.take("datasets"))]
    if parts:
        it.put("dataset", parts[0]["path"] if list(parts[0]) == ["path"] and len(parts) == 1 else parts)
    held_out = [_part(it, entry, folder) for entry in _list(it.take("test_datasets"))]
    if held_out:
        it.put("eval_dataset", held_out[0]["path"])
        for part in held_out[1:]:
            it.lost[f"test_datasets: {part['path']}"] = "one held-out file or folder is evaluated"
    it.put("max_length", it.take("sequence_len", 512))
    it.put("packing", bool(it.take("sample_packing", False)))
    it.put("assistant_only_loss", not it.take("train_on_inputs", False))
    it.put("num_train_epochs", it.take("num_epochs", 1.0))
    batch_of(it, "micro_batch_size", 1)
    if not (it.given.get("lr_scheduler") or it.given.get("lr_scheduler_type")):
        it.given["lr_scheduler"] = "cosine"
    take_common(it)
    name = it.take("wandb_name") or it.take("wandb_run_id")
    it.put("run_name", name)
    trackers = ["wandb"] if it.take("wandb_project") or it.take("use_wandb") else []
    take_trackers(it, trackers + (["tensorboard"] if it.take("use_tensorboard") else []))
    it.lose("val_set_size", HINTS["val_set_size"])
    it.lose("adapter", NO_ADAPTER)
    it.lose("load_in_8bit", NO_ADAPTER)
    it.lose("load_in_4bit", NO_ADAPTER)
    it.lose("chat_template", OWN_TEMPLATE)
    it.lose("special_tokens", "tokens are those of the model's folder")
    it.lose("plugins", "MegaTrain runs no code named by a file")
    it.lose("unfrozen_parameters", "name what is not trained with `freeze`, a list of regular expressions")
    it.lose_rest(PREFIXES)


def _list(value: object) -> list[dict[str, object]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _part(it: Translation, entry: dict[str, object], folder: Path) -> dict[str, object]:
    path = str(entry.get("path"))
    files = entry.get("data_files")
    files = files if isinstance(files, list) else [files] if files else []
    if files and path in ("json", "csv", "parquet", "arrow"):
        path = str(files[0])
        for file in files[1:]:
            it.lost[f"datasets: {path}: data_files: {file}"] = (
                "name each file, or their folder, as a dataset of its own"
            )
    elif files:
        it.lost[f"datasets: {path}: data_files: {files}"] = "name the files themselves"
    if not (folder / path).exists() and not Path(path).exists() and not HUB_NAME.fullmatch(path):
        it.lost[f"datasets: {path}"] = "no file here: download it and put the path of its file or folder in its place"
    kind = str(entry.get("type") or "")
    if kind.partition(".")[0] not in ("", "chat_template", *FORMATS):
        it.lost[f"datasets: {path}: type: {kind}"] = "the format is detected from the rows' keys"
    part: dict[str, object] = {"path": path}
    if kind in FORMATS:
        part["format"] = FORMATS[kind]
    roles = entry.get("roles_to_train")
    if roles is not None:
        it.put("train_roles", roles)
    for name in entry:
        if name not in KNOWN_IN_DATASET and entry[name] not in USUAL_KEYS.get(name, ()):
            it.lost[f"datasets: {path}: {name}"] = "rows are read by the usual keys; rename those of the file"
    if entry.get("split") not in (None, "train"):
        it.lost[f"datasets: {path}: split: {entry['split']}"] = "name the files of that split"
    return part

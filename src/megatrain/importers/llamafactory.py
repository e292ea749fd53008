"""LLaMA-Factory: https://github.com/hiyouga/LLaMA-Factory, its `examples/*/*.yaml`."""

from __future__ import annotations

import json
from pathlib import Path

from megatrain.config_spellings import HINTS
from megatrain.importers.translation import (
    OWN_TEMPLATE,
    Translation,
    batch_of,
    take_common,
    take_trackers,
)

FORMATS = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}
NO_ADAPTER = (
    "every parameter is trained; a learning rate that suits an adapter is usually ten times too high for all of them"
)
PREFIXES = {
    "lora_": NO_ADAPTER,
    "quantization_": NO_ADAPTER,
    "freeze_": "name what is not trained with `freeze`, a list of regular expressions",
    "galore_": "the optimizer is AdamW with exact fp32 state",
    "badam_": "the optimizer is AdamW with exact fp32 state",
    "use_badam": "the optimizer is AdamW with exact fp32 state",
    "use_galore": "the optimizer is AdamW with exact fp32 state",
    "pref_": "preference training is planned, not there yet",
    "ray_": "one process, one GPU",
}


def translate(it: Translation, folder: Path) -> None:
    """Fill `it` from a LLaMA-Factory file in `folder`. Its defaults that differ from ours are written out."""
    it.put("model", it.take("model_name_or_path"))
    _take_datasets(it, folder)
    it.put("max_length", it.take("cutoff_len", 2048))
    packing, neat = it.take("packing", False), it.take("neat_packing", False)
    it.put("packing", bool(packing or neat))
    it.put("assistant_only_loss", not it.take("train_on_prompt", False))
    it.put("num_train_epochs", it.take("num_train_epochs", 3.0))
    batch_of(it, "per_device_train_batch_size", 8)
    it.given.setdefault("learning_rate", 5e-5)
    it.given.setdefault("logging_steps", 500)
    take_common(it)
    take_trackers(it, it.take("report_to"))
    stage, method = it.take("stage", "sft"), it.take("finetuning_type", "lora")
    if stage not in ("sft", "pt"):
        it.lost[f"stage: {stage}"] = "MegaTrain trains on text and conversations (sft, pt); preferences are planned"
    if method != "full":
        it.lost[f"finetuning_type: {method}"] = NO_ADAPTER
    it.lose("template", OWN_TEMPLATE)
    it.lose("max_samples", "all rows are used; cut the file, or give the dataset a `repeat` below 1")
    it.lose("val_size", HINTS["val_size"])
    it.lose("mask_history", 'all assistant turns are trained; mark others in the rows with "train": false')
    it.lose("adapter_name_or_path", NO_ADAPTER)
    it.lose_rest(PREFIXES)


def _take_datasets(it: Translation, folder: Path) -> None:
    known = _dataset_info(folder, str(it.take("dataset_dir", "data")))
    names = _words(it.take("dataset"))
    shares = _words(it.take("interleave_probs"))
    strategy = str(it.take("mix_strategy", "concat"))
    parts = [_part(it, name, known) for name in names]
    if strategy.startswith("interleave") and len(shares) == len(parts):
        for part, share in zip(parts, shares, strict=True):
            part["weight"] = float(share)
        it.lost[f"mix_strategy: {strategy}"] = "an epoch holds as many rows as all datasets together, shared by weight"
    if parts:
        it.put("dataset", parts[0]["path"] if parts == [{"path": parts[0]["path"]}] else parts)
    held_out = _words(it.take("eval_dataset"))
    if held_out:
        it.put("eval_dataset", _part(it, held_out[0], known)["path"])
        for name in held_out[1:]:
            it.lost[f"eval_dataset: {name}"] = "one held-out file or folder is evaluated"


def _words(value: object) -> list[str]:
    """ "a, b" or [a, b] -> [a, b]."""
    items = value if isinstance(value, list) else str(value).split(",") if value is not None else []
    return [str(item).strip() for item in items]


def _part(it: Translation, name: str, known: dict[str, dict[str, object]]) -> dict[str, object]:
    """One dataset under its file name, if dataset_info.json tells it."""
    entry = known.get(name, {})
    if "file_name" not in entry:
        it.lost[f"dataset: {name}"] = (
            "a name of dataset_info.json, not a file: put the path of its file or folder in its place"
        )
        return {"path": name}
    part: dict[str, object] = {"path": entry["file_name"]}
    if entry.get("columns"):
        it.lost[f"dataset: {name}: columns"] = (
            "rows are read by their own keys; rename them to messages, or to Alpaca's"
        )
    elif entry.get("ranking"):
        it.lost[f"dataset: {name}: ranking"] = "preference training is planned, not there yet"
    else:
        part["format"] = FORMATS.get(str(entry.get("formatting", "alpaca")))
    return part


def _dataset_info(folder: Path, data_folder: str) -> dict[str, dict[str, object]]:
    """dataset_info.json, file names made paths, looked for from the config's folder upwards; {} if there is none."""
    for base in (folder, *folder.absolute().parents):
        file = base / data_folder / "dataset_info.json"
        if file.is_file():
            table = json.loads(file.read_text("utf-8"))
            return {
                name: {**entry, "file_name": str(file.parent / entry["file_name"])} if "file_name" in entry else entry
                for name, entry in table.items()
            }
    return {}

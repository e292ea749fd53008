"""From the dataset keys of a config to tokens and steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from megatrain.checkpoint import size_of_tree
from megatrain.cli.inputs import named_eval_dataset
from megatrain.cli.named import parts_of, token_cache
from megatrain.config import RunConfig
from megatrain.config_values import DatasetPart
from megatrain.data import BatchPlan, DataOptions, MicroBatch, Part, TokenDataset, eval_micro_batches, prepare
from megatrain.errors import DataError
from megatrain.planner.table import gib


def tokens_of(config: RunConfig, part: DatasetPart, tokenizer: PreTrainedTokenizerBase) -> TokenDataset:
    """A tokenised dataset, made now or found in the cache."""
    options = DataOptions(
        paths=(Path(part.path),),
        max_length=config.max_length,
        cache_dir=token_cache(),
        format=part.format,
        assistant_only_loss=config.assistant_only_loss,
        train_roles=config.train_roles,
        truncation=config.truncation,
    )
    try:
        return prepare(options, tokenizer)
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(options.cache_dir):
            raise DataError(
                f"dataset {error.filename} cannot be read: {error.strerror}; check that it may be"
            ) from error
        raise DataError(
            f"the token cache {options.cache_dir} cannot be used: {error}; free disk space there, or set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error


def training_parts(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[Part]:
    """Every training dataset with its share of an epoch."""
    return [Part(tokens_of(config, part, tokenizer), part.repeat, part.weight) for part in parts_of(config)]


def batches_of(config: RunConfig, parts: list[Part]) -> BatchPlan:
    """What every step trains on."""
    assert config.micro_batch_tokens is not None, "resolve the config first"
    return BatchPlan(
        parts,
        max_length=config.max_length,
        packing=config.packing,
        train_batch_size=config.train_batch_size,
        micro_batch_tokens=config.micro_batch_tokens,
        seed=config.seed,
        num_epochs=None if config.max_steps is not None else config.num_train_epochs,
        max_steps=config.max_steps,
    )


def num_steps_of(batches: BatchPlan) -> int:
    """Optimizer steps of the whole run."""
    assert batches.num_steps is not None, "either max_steps or num_train_epochs is given"
    return batches.num_steps


def data_lines(config: RunConfig, parts: list[Part], batches: BatchPlan) -> Iterator[str]:
    """What was read, one line a dataset, what was left out, and what an epoch is."""
    for named, part, num_rows in zip(parts_of(config), parts, batches.rows_by_part, strict=True):
        report = part.dataset.report
        yield (
            f"data: {named.path}: {report.format}, {report.rows_in} rows read, {report.rows_out} used, "
            f"{report.num_tokens:,} tokens, {report.trained_share:.1%} trained; {num_rows} rows of an epoch"
        )
        for reason, count in report.reasons.items():
            yield f"  left out: {count} rows: {reason}"
        for warning in report.warnings:
            yield f"  warning: {warning}"
        yield f"  tokens: {part.dataset.folder} ({gib(size_of_tree(part.dataset.folder))}), kept for later runs"
    epochs = num_steps_of(batches) / batches.steps_per_epoch
    yield (
        f"steps: {num_steps_of(batches)} of {config.train_batch_size} rows; an epoch is {batches.steps_per_epoch} "
        f"({batches.num_rows} rows), the run {epochs:.2f} epochs"
    )


def held_out(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[MicroBatch, ...]:
    """The evaluation set as micro-batches; empty without one."""
    if config.eval_dataset is None:
        return ()
    assert config.micro_batch_tokens is not None, "resolve the config first"
    with named_eval_dataset():
        return tuple(
            eval_micro_batches(
                tokens_of(config, DatasetPart(path=config.eval_dataset), tokenizer),
                max_length=config.max_length,
                packing=config.packing,
                micro_batch_tokens=config.micro_batch_tokens,
            )
        )

"""What a config names must be there. No torch: what is missing is said before it is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.cli.folders import refuse_shared_output
from megatrain.cli.named import parts_of
from megatrain.config import RunConfig
from megatrain.config_run import refuse_in_use, saved_steps
from megatrain.data.rows import list_files
from megatrain.errors import DataError
from megatrain.models.hub import hub_name, refuse_no_config


def refuse_start(config: RunConfig) -> None:
    """UserError if a run of `config` cannot start: its folder is another's or at work, its model or data not there."""
    refuse_shared_output(config)
    refuse_in_use(Path(config.output_dir))
    if hub_name(config.model) is None:  # else it is fetched
        refuse_no_config(source_of(config))
    refuse_no_rows(config)
    refuse_no_eval_rows(config)


def refuse_no_model(config: RunConfig) -> None:
    """ModelError if the model's folder is not there, and is no name on the hub either."""
    if hub_name(config.model) is None:
        refuse_no_config(Path(config.model))


def refuse_no_rows(config: RunConfig) -> None:
    """DataError if a training dataset is not there, and is no name on the hub either."""
    for part in parts_of(config):
        _refuse_no_files(part.path)


def refuse_no_eval_rows(config: RunConfig) -> None:
    """DataError if there is to be an evaluation, and its dataset is not there."""
    if config.eval_dataset is not None:
        with named_eval_dataset():
            _refuse_no_files(config.eval_dataset)


def _refuse_no_files(path: str) -> None:
    if hub_name(path) is None:
        list_files((Path(path),))


@contextmanager
def named_eval_dataset() -> Iterator[None]:
    """Inside, what is said of a dataset is said of the one that `eval_dataset` names."""
    try:
        yield
    except DataError as error:
        text = str(error)
        raise DataError(f"eval_{text}" if text.startswith("dataset ") else f"eval_dataset: {text}") from error


def source_of(config: RunConfig) -> Path:
    """Where the model's config and tokenizer are: its folder, or, if that is gone, the run's newest checkpoint."""
    model, out = Path(config.model), Path(config.output_dir)
    steps = saved_steps(out)
    if (model / "config.json").is_file():
        return model.absolute()  # as a resolved config has it
    if not steps:
        return model
    return out.absolute() / "checkpoints" / f"step-{steps[-1]}" / "model"

"""`megatrain report`: the page of a run. No torch: only samples need it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatrain.cli.pointed import base_of, config_of, is_run
from megatrain.config import RunConfig
from megatrain.config_run import replace_text
from megatrain.errors import CheckpointError
from megatrain.report import SAMPLES, Sample, page, read_record


def config_to_report(path: Path, prompts: Sequence[str]) -> RunConfig:
    """The config of the run in `path`, for its samples; CheckpointError if it is none."""
    if not is_run(path):
        raise CheckpointError(f"{path} is a model folder; a report is made of a run folder")
    if prompts:
        base_of(path)
    return config_of(path, ())


def report(path: Path, samples: Sequence[Sample]) -> int:
    """Write RUN/report/index.html and say where it lies. Without `samples`, those that are there stay."""
    folder = path / "report"
    folder.mkdir(mode=0o700, exist_ok=True)
    if samples:
        replace_text(folder / SAMPLES, json.dumps({"samples": [asdict(sample) for sample in samples]}, indent=1))
    replace_text(folder / "index.html", page(read_record(path)))
    print(f"report: {folder / 'index.html'}")
    return 0

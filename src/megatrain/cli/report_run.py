"""`megatrain report`: the page of a run, with samples of the base model and of the newest checkpoint if asked for."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatrain.checkpoint import saved_steps
from megatrain.cli.chat import talker_of
from megatrain.cli.opened import config_of, is_run, sources_of
from megatrain.errors import CheckpointError
from megatrain.models.generate import Sampling
from megatrain.report import SAMPLES, Sample, page, read_record
from megatrain.train.run_folder import replace_text

SAMPLE_TOKENS = 96


def report(path: Path, prompts: Sequence[str], *, raw: bool) -> int:
    """Write RUN/report/index.html and say where it lies. `prompts`: asked before and after, greedily, and kept."""
    if not is_run(path):
        raise CheckpointError(f"{path} is a model folder; a report is made of a run folder")
    folder = path / "report"
    folder.mkdir(mode=0o700, exist_ok=True)
    if prompts:
        samples = [asdict(sample) for sample in _samples(path, prompts, raw=raw)]
        replace_text(folder / SAMPLES, json.dumps({"samples": samples}, indent=1))
    replace_text(folder / "index.html", page(read_record(path)))
    print(f"report: {folder / 'index.html'}")
    return 0


def _samples(path: Path, prompts: Sequence[str], *, raw: bool) -> list[Sample]:
    """What the base model and the newest checkpoint say, by most likely word."""
    config = config_of(path, ())
    wanted = ["base", "latest"] if saved_steps(path) else ["base"]
    samples = []
    for source in sources_of(path, wanted):
        talker = talker_of(config, source, raw=raw)
        for prompt in prompts:
            asked = [{"role": "user", "content": prompt}]
            writer = talker.answer(asked, Sampling(SAMPLE_TOKENS, temperature=0.0), io.StringIO())
            samples.append(Sample(source.step or 0, prompt, writer.text))
        talker.close()
    return samples

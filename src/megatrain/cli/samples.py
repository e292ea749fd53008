"""Samples of a report: what the base model and the newest checkpoint of a run say, by most likely word."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from megatrain.cli.chat import talker_of
from megatrain.cli.opened import sources_of
from megatrain.cli.prompts import refuse_no_text
from megatrain.config import RunConfig
from megatrain.config_run import saved_steps
from megatrain.models.generate import Sampling
from megatrain.report import Sample

SAMPLE_TOKENS = 96


def samples_of(path: Path, config: RunConfig, prompts: Sequence[str], *, raw: bool) -> list[Sample]:
    """One for each prompt before training, and, where there is a checkpoint, one after it."""
    for prompt in prompts:
        refuse_no_text(prompt)
    samples = []
    for source in sources_of(path, ["base", "latest"] if saved_steps(path) else ["base"]):
        talker = talker_of(config, source, raw=raw)
        for prompt in prompts:
            asked = [{"role": "user", "content": prompt}]
            writer = talker.answer(asked, Sampling(SAMPLE_TOKENS, temperature=0.0), io.StringIO())
            samples.append(Sample(source.step or 0, prompt, writer.text))
        talker.close()
    return samples

"""Wires the rooms: from a config to a planned run, its template, its store, its engine. Order and wiring only."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from megatrain.checkpoint import CHECKPOINTS, read_buffers, size_of_tree
from megatrain.cli import show
from megatrain.cli.datasets import parts_of, tokens_of
from megatrain.config import RunConfig, resolved
from megatrain.data import preview
from megatrain.engine import Engine, Numerics
from megatrain.errors import ConfigError
from megatrain.hardware import Machine
from megatrain.hardware.probe import probe
from megatrain.memory import available_ram_bytes
from megatrain.models import attention
from megatrain.models.hf_folder import read_hf_config, read_tokenizer
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from megatrain.planner import MemoryTable, misfit, plan_run
from megatrain.schedule.plan import Plan
from megatrain.store import SegmentStore


@dataclass(frozen=True)
class Planned:
    """A run before anything is loaded: resolved config, machine, model as numbers, plan and its price.

    `source`: the folder that has the model's config, tokenizer and buffers.
    """

    config: RunConfig
    source: Path
    machine: Machine
    hf_config: PreTrainedConfig
    spec: ModelSpec
    plan: Plan
    table: MemoryTable

    @property
    def device(self) -> torch.device:
        return torch.device(self.machine.device)


def planned(config: RunConfig, source: Path | None = None) -> Planned:
    """Resolve and plan; reads the config.json of `source` (None: of the config's model) and no weight."""
    transformers.logging.set_verbosity_error()
    out = Path(config.output_dir)
    machine = probe(config.device, out, available_ram_bytes())
    # The plan counts every checkpoint that a run keeps: those that are there already are among them.
    machine = replace(machine, disk_free_bytes=machine.disk_free_bytes + size_of_tree(out / CHECKPOINTS))
    config = resolved(config, machine.device, machine.num_cores)
    source = source or Path(config.model)
    hf_config = read_hf_config(source)
    spec = model_spec(hf_config, freeze=config.freeze, allow_unproven=config.allow_unproven)
    if config.max_length > spec.max_positions:
        raise ConfigError(
            f"max_length is {config.max_length}, but the model knows {spec.max_positions} positions; "
            f"set max_length to at most {spec.max_positions}"
        )
    plan, table = plan_run(spec, config, machine)
    return Planned(config, source, machine, hf_config, spec, plan, table)


def template_of(run: Planned) -> ModelTemplate:
    """The model's own layers, without weights; buffers that its folder holds are filled."""
    dtype = torch.bfloat16 if run.config.precision == "bf16" else torch.float32
    template = ModelTemplate(
        run.hf_config,
        run.device,
        dtype,
        freeze=run.config.freeze,
        allow_unproven=run.config.allow_unproven,
        attn_implementation=attention.NAME if run.config.deterministic else attention.NAME_FAST,
    )
    for name, (_, value) in read_buffers(run.source, run.spec).items():
        template.saved_buffers[name].copy_(value)
    if run.config.compile:
        template.compile_blocks()
    return template


def store_of(run: Planned) -> SegmentStore:
    """Homes for every segment, empty."""
    assert run.config.precision != "auto", "resolve the config first"
    layouts = [layout_of(segment) for segment in run.spec.segments]
    return SegmentStore(layouts, run.config.precision, run.plan, run.device)


def engine_of(run: Planned, store: SegmentStore) -> Engine:
    """The engine over `store`."""
    config = run.config
    assert config.micro_batch_tokens is not None, "resolve the config first"
    assert config.loss_chunk_tokens is not None, "resolve the config first"
    assert config.optimizer_threads is not None, "resolve the config first"
    numerics = Numerics(
        config.micro_batch_tokens,
        config.loss_chunk_tokens,
        config.max_grad_norm,
        config.label_smoothing_factor,
        config.neftune_noise_alpha,
        config.seed,
    )
    return Engine(template_of(run), store, run.plan, numerics, run.device, optimizer_threads=config.optimizer_threads)


def show_plan(config: RunConfig, *, as_json: bool) -> int:
    """Print the plan, and what would fit if it does not. 0 if it fits, 1 if not."""
    run = planned(config)
    reason = misfit(run.spec, run.config, run.machine, run.table)
    if as_json:
        shown = show.plan_json(run.spec, run.plan, run.table, run.machine)
        print(json.dumps({**shown, "misfit": reason}, indent=1))
    else:
        lines = [show.machine_line(run.machine), *show.plan_lines(run.spec, run.plan, run.table)]
        print("\n".join([*lines, reason] if reason else lines))
    return 1 if run.table.overall == "NO" else 0


def preview_data(config: RunConfig) -> int:
    """Print what would be trained."""
    tokenizer = read_tokenizer(Path(config.model))
    for part in parts_of(config):
        dataset = tokens_of(config, part, tokenizer)
        show.show_preview(part.path, dataset.report, preview(dataset, tokenizer))
    return 0

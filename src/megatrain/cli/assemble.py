"""Wires the rooms: from a config to a planned run, its template, its store, its engine. Order and wiring only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from megatrain.checkpoint import CHECKPOINTS, read_buffers, size_of_tree
from megatrain.cli import show
from megatrain.cli.datasets import tokens_of
from megatrain.cli.named import localized, parts_of
from megatrain.config import RunConfig, resolved
from megatrain.data import preview
from megatrain.engine import Engine, Numerics
from megatrain.errors import ConfigError
from megatrain.hardware import Machine
from megatrain.hardware.described import Described, likely_rates
from megatrain.hardware.host import describe_host
from megatrain.hardware.measured import cache_file, load_measured
from megatrain.hardware.probe import describe_gpu, probe
from megatrain.hardware.rates import Rates, rates_of
from megatrain.memory import available_ram_bytes
from megatrain.memory.limits import cgroup_limit_bytes, locked_memory_limit_bytes
from megatrain.models import attention
from megatrain.models.determinism import repeat_bits
from megatrain.models.families import family_of
from megatrain.models.hf_folder import read_hf_config, read_tokenizer
from megatrain.models.meta import architecture_of
from megatrain.models.router import ROUTERS, with_coefficient
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from megatrain.planner import MemoryTable, Question, memory_table, question_of, refuse_endless, search
from megatrain.planner.plan_file import read_plan
from megatrain.planner.sizes import layouts_of
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
    rates: Rates
    hf_config: PreTrainedConfig
    spec: ModelSpec
    plan: Plan
    table: MemoryTable

    @property
    def question(self) -> Question:
        """What the plan answers."""
        return question_of(self.spec, self.config, self.machine, self.rates)

    @property
    def device(self) -> torch.device:
        return torch.device(self.machine.device)


def planned(
    config: RunConfig,
    source: Path | None = None,
    *,
    plan_file: Path | None = None,
    described: Described | None = None,
) -> Planned:
    """Resolve and plan; reads the config.json of `source` (None: of the config's model) and no weight. From here on
    the framework's own kernels do what `deterministic` asks of them, unless another machine is planned for.

    `config`: with local folders only.
    `plan_file`: a plan to follow instead of choosing one. `described`: another machine than this one.
    """
    transformers.logging.set_verbosity_error()
    machine, rates = _here(config) if described is None else (described.machine, described.rates)
    if config.device not in ("auto", machine.device):
        raise ConfigError(f"device is {config.device}, but the machine plans for {machine.device}; set it to auto")
    source = Path(config.model) if source is None else source
    hf_config = read_hf_config(source)
    spec = model_spec(_routed(hf_config, config), freeze=config.freeze, allow_unproven=config.allow_unproven)
    config = resolved(_compiling(_within_positions(config, spec), hf_config), machine.device, machine.num_cores)
    if config.max_length > spec.max_positions:
        raise ConfigError(
            f"max_length is {config.max_length}, but the model knows {spec.max_positions} positions; "
            f"set max_length to at most {spec.max_positions}"
        )
    question = question_of(spec, config, machine, rates)
    refuse_endless(question)
    plan = search(question) if plan_file is None else read_plan(plan_file, question)
    if described is None and machine.device == "cuda":
        repeat_bits(config.deterministic)  # here: it must precede the process's first product on the GPU
    return Planned(config, source, machine, rates, hf_config, spec, plan, memory_table(question, plan))


def _routed(hf_config: PreTrainedConfig, config: RunConfig) -> PreTrainedConfig:
    """The model's config for training: routers are balanced as the run asks. What is saved keeps the model's own."""
    coefficient, architecture = config.router_aux_loss_coef, architecture_of(hf_config)
    if coefficient and architecture not in ROUTERS:
        raise ConfigError(
            f"router_aux_loss_coef is {coefficient:g}, but {architecture} has no routers with a loss that transformers "
            "knows; leave it out, or set it to 0"
        )
    return with_coefficient(hf_config, coefficient)


def _compiling(config: RunConfig, hf_config: PreTrainedConfig) -> RunConfig:
    """`config` without the compiler where a layer would be compiled anew for nearly every micro-batch."""
    architecture = architecture_of(hf_config)
    if family_of(architecture, config.allow_unproven).one_graph:
        return config
    if config.compile:
        raise ConfigError(
            f"compile is true, but in a layer of {architecture} shapes follow where tokens are routed: it would be "
            "compiled anew for nearly every micro-batch; set compile to false"
        )
    return config.model_copy(update={"compile": False})


def _within_positions(config: RunConfig, spec: ModelSpec) -> RunConfig:
    """`config` with no longer rows than the model knows positions, unless it says how long they are to be."""
    if "max_length" in config.model_fields_set or config.max_length <= spec.max_positions:
        return config
    return config.model_copy(update={"max_length": spec.max_positions})


def _here(config: RunConfig) -> tuple[Machine, Rates]:
    """This machine, and its rates: what `megatrain doctor` measured, else what such a machine is likely to have."""
    out = Path(config.output_dir)
    machine = probe(config.device, out, available_ram_bytes())
    # The plan counts every checkpoint that a run keeps: those that are there already are among them.
    machine = replace(machine, disk_free_bytes=machine.disk_free_bytes + size_of_tree(out / CHECKPOINTS))
    host = describe_host(available_ram_bytes(), cgroup_limit_bytes(), locked_memory_limit_bytes())
    gpu = describe_gpu() if machine.device == "cuda" else None
    measured = load_measured(cache_file(host, gpu))
    return machine, likely_rates(machine) if measured is None else rates_of(measured)


def template_of(run: Planned) -> ModelTemplate:
    """The model's own layers, without weights; buffers that its folder holds are filled."""
    dtype = torch.bfloat16 if run.config.precision == "bf16" else torch.float32
    template = ModelTemplate(
        _routed(run.hf_config, run.config),
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
    layouts = list(layouts_of(run.spec, run.config).values())
    return SegmentStore(layouts, run.config.precision, run.plan, run.device, Path(run.config.output_dir))


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
        config.ema_decay,
    )
    return Engine(template_of(run), store, run.plan, numerics, run.device, optimizer_threads=config.optimizer_threads)


def preview_data(config: RunConfig) -> int:
    """Print what would be trained."""
    config = localized(config)
    tokenizer = read_tokenizer(Path(config.model))
    config = _within_positions(config, model_spec(read_hf_config(Path(config.model)), allow_unproven=True))
    for part in parts_of(config):
        dataset = tokens_of(config, part, tokenizer)
        show.show_preview(part.path, dataset.report, preview(dataset, tokenizer))
    return 0

"""Wires the rooms: from a config to a planned run, a trained model, a shown table. Order and wiring only."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from megatrain import __version__
from megatrain.checkpoint import load_weights, write_hf_folder
from megatrain.cli import show
from megatrain.config import RunConfig, read_config, resolved
from megatrain.data import BatchPlan, DataOptions, MicroBatch, TokenDataset, eval_micro_batches, prepare
from megatrain.data import preview as data_preview
from megatrain.engine import Engine, Numerics
from megatrain.errors import CheckpointError, ConfigError, ModelError
from megatrain.hardware import Machine
from megatrain.hardware.probe import probe
from megatrain.memory import available_ram_bytes
from megatrain.models import attention
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from megatrain.planner import MemoryTable, plan_run, refuse_misfit
from megatrain.schedule.plan import Plan
from megatrain.store import SegmentStore
from megatrain.train import Run, RunFolder, train
from megatrain.train.metrics import Metrics, Work
from megatrain.train.progress import display


@dataclass(frozen=True)
class Planned:
    """A run before anything is loaded: resolved config, machine, model as numbers, plan and its price."""

    config: RunConfig
    machine: Machine
    hf_config: PreTrainedConfig
    spec: ModelSpec
    plan: Plan
    table: MemoryTable

    @property
    def device(self) -> torch.device:
        return torch.device(self.machine.device)


def planned(config: RunConfig) -> Planned:
    """Resolve and plan; reads the model's config.json and no weight."""
    transformers.logging.set_verbosity_error()
    machine = probe(config.device, Path(config.output_dir), available_ram_bytes())
    config = resolved(config, machine.device, machine.num_cores)
    hf_config = hf_config_of(config)
    spec = model_spec(hf_config, freeze=config.freeze, allow_unproven=config.allow_unproven)
    if config.max_length > spec.max_positions:
        raise ConfigError(
            f"max_length is {config.max_length}, but the model knows {spec.max_positions} positions; "
            f"set max_length to at most {spec.max_positions}"
        )
    plan, table = plan_run(spec, config, machine)
    return Planned(config, machine, hf_config, spec, plan, table)


def hf_config_of(config: RunConfig) -> PreTrainedConfig:
    """The model's config.json, as transformers reads it."""
    if not (Path(config.model) / "config.json").is_file():
        raise ModelError(
            f"model {config.model!r} is no folder with a config.json; download it first "
            "(for example: hf download ORG/NAME --local-dir FOLDER) and give that folder"
        )
    return AutoConfig.from_pretrained(config.model, local_files_only=True, trust_remote_code=False)


def tokenizer_of(config: RunConfig) -> PreTrainedTokenizerBase:
    """The model's own tokenizer."""
    return AutoTokenizer.from_pretrained(config.model, local_files_only=True, trust_remote_code=False)


def dataset_of(config: RunConfig, path: str, tokenizer: PreTrainedTokenizerBase) -> TokenDataset:
    """The tokenised dataset at `path`, made now or found in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatrain" / "tokens"
    options = DataOptions(
        paths=(Path(path),),
        max_length=config.max_length,
        cache_dir=cache,
        assistant_only_loss=config.assistant_only_loss,
    )
    return prepare(options, tokenizer)


def batches_of(config: RunConfig, dataset: TokenDataset) -> BatchPlan:
    """What every step trains on."""
    assert config.micro_batch_tokens is not None, "resolve the config first"
    return BatchPlan(
        dataset,
        max_length=config.max_length,
        packing=config.packing,
        train_batch_size=config.train_batch_size,
        micro_batch_tokens=config.micro_batch_tokens,
        seed=config.seed,
        num_epochs=None if config.max_steps is not None else config.num_train_epochs,
        max_steps=config.max_steps,
    )


def held_out(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[MicroBatch, ...]:
    """The evaluation set as micro-batches; empty without one."""
    if config.eval_dataset is None:
        return ()
    assert config.micro_batch_tokens is not None, "resolve the config first"
    dataset = dataset_of(config, config.eval_dataset, tokenizer)
    return tuple(
        eval_micro_batches(
            dataset,
            max_length=config.max_length,
            packing=config.packing,
            micro_batch_tokens=config.micro_batch_tokens,
        )
    )


def template_of(run: Planned) -> ModelTemplate:
    """The model's own layers, without weights."""
    dtype = torch.bfloat16 if run.config.precision == "bf16" else torch.float32
    return ModelTemplate(
        run.hf_config,
        run.device,
        dtype,
        freeze=run.config.freeze,
        allow_unproven=run.config.allow_unproven,
        attn_implementation=attention.NAME if run.config.deterministic else attention.NAME_FAST,
    )


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
    numerics = Numerics(config.micro_batch_tokens, config.loss_chunk_tokens, config.max_grad_norm)
    return Engine(
        template_of(run), store, run.plan, numerics, run.device, optimizer_threads=config.optimizer_threads
    )


def train_config(config: RunConfig, allowed: frozenset[str]) -> int:
    """Train as `config` says. The exit code: 0, or 128 + the signal that stopped the run."""
    run = planned(config)
    lines = [
        *show.config_lines(run.config),
        show.machine_line(run.machine),
        *show.plan_lines(run.spec, run.plan, run.table),
    ]
    refuse_misfit(run.spec, run.config, run.machine, run.table)
    with RunFolder(Path(run.config.output_dir)) as folder:
        return _train_in(folder, run, lines, allowed)


def _train_in(folder: RunFolder, run: Planned, lines: Sequence[str], allowed: frozenset[str]) -> int:
    config = run.config
    tokenizer = tokenizer_of(config)
    batches = batches_of(config, dataset_of(config, config.dataset, tokenizer))
    evaluation = held_out(config, tokenizer)
    folder.begin(config, show.plan_json(run.spec, run.plan, run.table, run.machine), environment(run.machine))
    store = store_of(run)
    load_weights(Path(config.model), store, run.spec)
    engine = engine_of(run, store)
    screen = display(0, batches.num_steps)
    work = Work(run.spec, tuple(block.activations == "recompute" for block in run.plan.blocks), None)
    metrics = Metrics(folder.metrics, folder.log, screen, run.device, work, config.logging_steps)
    for line in lines:
        metrics.say(line)
    outcome = train(
        Run(
            config=config,
            engine=engine,
            data=batches,
            num_steps=batches.num_steps,
            start_step=0,
            eval_micro_batches=evaluation,
            checkpoints=None,
            metrics=metrics,
        )
    )
    engine.close()
    store.close()
    return 0 if outcome.signal is None else 128 + outcome.signal


def environment(machine: Machine) -> dict[str, object]:
    """env.json: what the bits may depend on. No paths of the user, no variables, no tokens."""
    return {
        "megatrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "transformers": transformers.__version__,
        "system": platform.platform(),
        "torch_threads": torch.get_num_threads(),
        "machine": asdict(machine),
    }


def show_plan(config: RunConfig, *, as_json: bool) -> int:
    """Print the plan. 0 if it fits, 1 if not."""
    run = planned(config)
    if as_json:
        print(json.dumps(show.plan_json(run.spec, run.plan, run.table, run.machine), indent=1))
    else:
        lines = [show.machine_line(run.machine), *show.plan_lines(run.spec, run.plan, run.table)]
        print("\n".join(lines))
    return 1 if run.table.overall == "NO" else 0


def preview_data(config: RunConfig) -> int:
    """Print what would be trained."""
    tokenizer = tokenizer_of(config)
    dataset = dataset_of(config, config.dataset, tokenizer)
    show.show_preview(dataset.report, data_preview(dataset, tokenizer))
    return 0

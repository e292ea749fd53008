"""Wires the rooms: from a config to a planned run, a trained model, a shown table. Order and wiring only."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig

from megatrain import __version__
from megatrain.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    load_checkpoint,
    load_weights,
    read_buffers,
    restore,
    write_hf_folder,
)
from megatrain.cli import show
from megatrain.cli.datasets import (
    batches_of,
    data_lines,
    held_out,
    num_steps_of,
    parts_of,
    tokenizer_of,
    tokens_of,
    training_parts,
)
from megatrain.config import RunConfig, read_config, resolved
from megatrain.data import BatchPlan, MicroBatch, preview
from megatrain.engine import Engine, Numerics
from megatrain.errors import CheckpointError, ConfigError
from megatrain.hardware import Machine
from megatrain.hardware.probe import matmul_flops_per_s, probe
from megatrain.memory import available_ram_bytes, cap_device_memory
from megatrain.models import attention
from megatrain.models.hf_folder import read_hf_config
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from megatrain.planner import MemoryTable, misfit, plan_run, refuse_misfit
from megatrain.schedule.plan import Plan
from megatrain.store import SegmentStore
from megatrain.train import Keeper, Run, RunFolder, Watch, refuse_other_run, train
from megatrain.train.metrics import Metrics, Work
from megatrain.train.progress import display
from megatrain.train.trackers import load_trackers, open_trackers


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
    hf_config = read_hf_config(Path(config.model))
    spec = model_spec(hf_config, freeze=config.freeze, allow_unproven=config.allow_unproven)
    if config.max_length > spec.max_positions:
        raise ConfigError(
            f"max_length is {config.max_length}, but the model knows {spec.max_positions} positions; "
            f"set max_length to at most {spec.max_positions}"
        )
    plan, table = plan_run(spec, config, machine)
    return Planned(config, machine, hf_config, spec, plan, table)


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
    for name, (_, value) in read_buffers(Path(run.config.model), run.spec).items():
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


def train_config(config: RunConfig, allowed: frozenset[str], *, must_resume: bool = False) -> int:
    """Train as `config` says. The exit code: 0, or 128 + the signal that stopped the run."""
    packages = load_trackers(config)
    run = planned(config)
    refuse_misfit(run.spec, run.config, run.machine, run.table)
    with RunFolder(Path(run.config.output_dir)) as folder:
        checkpoint = _checkpoint_of(folder, run.config, allowed, must_resume=must_resume)
        tokenizer = tokenizer_of(run.config)
        parts = training_parts(run.config, tokenizer)
        batches = batches_of(run.config, parts)
        facts = {"data": batches.fingerprint, "versions": versions()}
        start_step = 0
        if checkpoint is not None:
            refuse_other_run(checkpoint, facts, allowed)
            start_step = checkpoint.step
        folder.begin(run.config, show.plan_json(run.spec, run.plan, run.table, run.machine), environment(run.machine))
        folder.cut_metrics(start_step)
        screen = display(start_step, num_steps_of(batches))
        with Metrics(
            folder.metrics,
            folder.log,
            screen,
            run.device,
            work_of(run),
            logging_steps=run.config.logging_steps,
            num_steps=num_steps_of(batches),
        ) as metrics:
            announce(run, checkpoint, data_lines(run.config, parts, batches), metrics)
            metrics.track(lambda say: open_trackers(packages, run.config, folder.path, say))
            evaluation = held_out(run.config, tokenizer)
            return _train_in(folder, run, batches, evaluation, checkpoint, facts, metrics)


def work_of(run: Planned) -> Work:
    """What a step's arithmetic is counted from, with the peak of this machine, measured now."""
    dtype = torch.bfloat16 if run.config.precision == "bf16" else torch.float32
    recomputed = tuple(block.activations == "recompute" for block in run.plan.blocks)
    return Work(run.spec, recomputed, matmul_flops_per_s(run.device, dtype))


def announce(run: Planned, checkpoint: Checkpoint | None, data: Iterable[str], metrics: Metrics) -> None:
    """The first lines of a run: config, precision, machine, plan, data, and where it goes on."""
    for line in show.config_lines(run.config):
        metrics.say(line)
    metrics.say(show.machine_line(run.machine))
    for line in show.plan_lines(run.spec, run.plan, run.table):
        metrics.say(line)
    for line in data:
        metrics.say(line)
    if run.config.save_strategy == "no":
        metrics.say("save_strategy is no: nothing is saved until the end, and a stopped run is lost")
    if checkpoint is not None:
        for damage in checkpoint.skipped:
            metrics.say(f"passed over: {damage}")
        metrics.say(f"going on after step {checkpoint.step}")


def _checkpoint_of(
    folder: RunFolder, config: RunConfig, allowed: frozenset[str], *, must_resume: bool
) -> Checkpoint | None:
    """The checkpoint to go on from, with the run's config proven the same; None to start anew."""
    checkpoint = load_checkpoint(folder.path, "auto") if folder.checkpoints.is_dir() else None
    if checkpoint is None:
        if must_resume:
            raise CheckpointError(f"{folder.path} holds no checkpoint to resume from; start it with megatrain train")
        if final_model(folder).exists():
            raise ConfigError(f"output_dir {folder.path} already holds a trained model; choose another output_dir")
        return None
    if config.resume_from_checkpoint == "never":
        raise ConfigError(
            f"output_dir {folder.path} already holds step {checkpoint.step} and resume_from_checkpoint is never; "
            "choose another output_dir, or set resume_from_checkpoint to auto"
        )
    folder.refuse_changes(config, allowed)
    return checkpoint


def final_model(folder: RunFolder) -> Path:
    """Where the model lies at the end of a run that keeps no checkpoints."""
    return folder.path / "model"


def _train_in(
    folder: RunFolder,
    run: Planned,
    batches: BatchPlan,
    evaluation: Sequence[MicroBatch],
    checkpoint: Checkpoint | None,
    facts: Mapping[str, object],
    metrics: Metrics,
) -> int:
    config = run.config
    if config.memory.hbm is not None and run.device.type == "cuda":
        cap_device_memory(config.memory.hbm)
    store = store_of(run)
    if checkpoint is None:
        load_weights(Path(config.model), store, run.spec)
    else:
        restore(store, checkpoint)
    engine = engine_of(run, store)
    start_step, trainer_state = 0, {}
    if checkpoint is not None:
        start_step, trainer_state = checkpoint.step, checkpoint.trainer_state
        engine.applied_steps = trainer_state["applied_steps"]
    watch = Watch(config.early_stopping_patience, config.early_stopping_threshold, trainer_state)
    keeper = None
    if config.save_strategy != "no":
        source, keep = Path(config.model), config.save_total_limit
        writer = CheckpointWriter(folder.path, store, run.spec, run.hf_config, source, keep=keep, run_facts=dict(facts))
        keeper = Keeper(writer, engine, watch, start_step)
    outcome = train(Run(config, engine, batches, num_steps_of(batches), start_step, evaluation, keeper, metrics, watch))
    engine.close()
    if keeper is None and outcome.signal is None:
        target = final_model(folder)
        write_hf_folder(target, store, run.spec, run.hf_config, Path(config.model), dtype=store.dtype("w"))
        metrics.say(f"model: {target}")
    elif keeper is not None:
        metrics.say(f"model: {folder.checkpoints / f'step-{outcome.step}' / 'model'}")
        if watch.best_step is not None:
            best = folder.checkpoints / f"step-{watch.best_step}" / "model"
            metrics.say(f"best: {best} (eval_loss {watch.best_loss:.4f})")
    store.close()
    return 0 if outcome.signal is None else 128 + outcome.signal


def resume_run(path: Path, words: Sequence[str], allowed: frozenset[str]) -> int:
    """Go on with the run in `path`; the folder may have been moved."""
    return train_config(run_config(path, words), allowed, must_resume=True)


def run_config(path: Path, words: Sequence[str] = ()) -> RunConfig:
    """The config of a run folder, with `key=value` words, for where the folder is now."""
    if not (path / "config.yaml").is_file():
        raise CheckpointError(f"{path} is no run folder: it has no config.yaml")
    return read_config(path / "config.yaml", words).model_copy(update={"output_dir": str(path.absolute())})


def versions() -> dict[str, str]:
    """Of what the bits of a step depend on."""
    return {"megatrain": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def environment(machine: Machine) -> dict[str, object]:
    """env.json: what the bits may depend on. No paths of the user, no variables, no tokens."""
    return {
        **versions(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "torch_threads": torch.get_num_threads(),
        "machine": asdict(machine),
    }


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
    tokenizer = tokenizer_of(config)
    for part in parts_of(config):
        dataset = tokens_of(config, part, tokenizer)
        show.show_preview(part.path, dataset.report, preview(dataset, tokenizer))
    return 0

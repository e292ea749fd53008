"""`megatrain train` and `megatrain resume`: from a config to a trained model, or on from the newest checkpoint."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import torch
import transformers

from megatrain import __version__
from megatrain.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    check_weights,
    has_average,
    load_checkpoint,
    load_weights,
    restore,
    write_hf_folder,
)
from megatrain.cli import show
from megatrain.cli.assemble import Planned, engine_of, planned, store_of
from megatrain.cli.datasets import batches_of, data_lines, held_out, num_steps_of, training_parts
from megatrain.cli.folders import refuse_no_room
from megatrain.cli.inputs import source_of
from megatrain.cli.named import localized, sources
from megatrain.cli.shortage import explained_shortage
from megatrain.config import RunConfig
from megatrain.config_run import FACTS, saved_steps
from megatrain.data import BatchPlan, MicroBatch
from megatrain.errors import CheckpointError, ConfigError, UserError
from megatrain.hardware import Machine
from megatrain.hardware.probe import matmul_flops_per_s
from megatrain.memory import cap_device_memory
from megatrain.models.hf_folder import read_tokenizer
from megatrain.planner import refuse_misfit
from megatrain.planner.price import price_of
from megatrain.train import Keeper, Outcome, Run, RunFolder, Watch, refuse_other_run, train
from megatrain.train.metrics import Metrics, Work
from megatrain.train.progress import display
from megatrain.train.trackers import load_trackers, open_trackers


def train_config(
    config: RunConfig, allowed: frozenset[str], *, must_resume: bool = False, plan_file: Path | None = None
) -> int:
    """Train as `config` says. The exit code: 0, or 128 + the signal that stopped the run.

    `allowed`: what may differ from the run that is resumed. `plan_file`: a plan.json to follow; None: the planner
    chooses.
    """
    packages = load_trackers(config)
    config = localized(config)
    run = planned(config, source_of(config), plan_file=plan_file)
    refuse_misfit(run.question, run.plan, plan_file=plan_file)
    refuse_no_room(run.config, run.spec.num_parameters, run.machine.disk_free_bytes)
    with RunFolder(Path(run.config.output_dir)) as folder, explained_shortage(run):
        checkpoint = _checkpoint_of(folder, run.config, allowed, must_resume=must_resume)
        if checkpoint is not None and run.source != Path(run.config.model):
            run = replace(run, source=checkpoint.path / "model")  # verified, unlike the newest
        if checkpoint is None:
            check_weights(run.source, run.spec)  # before data are tokenised for hours
        tokenizer = read_tokenizer(run.source)
        parts = training_parts(run.config, tokenizer)
        batches = batches_of(run.config, parts)
        evaluation = held_out(run.config, tokenizer)
        facts: dict[str, object] = dict(zip(FACTS, (batches.fingerprint, versions()), strict=True))
        if checkpoint is not None:
            refuse_other_run(checkpoint, facts, allowed)
        num_steps, logging_steps = num_steps_of(batches), run.config.logging_steps
        start_step = _done_steps(checkpoint, num_steps)
        refuse_misfit(run.question, run.plan, range(start_step, num_steps), plan_file)
        plan_facts = show.plan_json(run.spec, run.plan, run.table, run.machine)
        folder.begin(run.config, plan_facts, environment(run.machine, run.config))
        folder.cut_metrics(start_step)
        screen, work = display(start_step, num_steps), work_of(run)
        with Metrics(
            folder.metrics, folder.log, screen, run.device, work, logging_steps=logging_steps, num_steps=num_steps
        ) as metrics:
            announce(run, checkpoint, data_lines(run.config, parts, batches), metrics)
            price = price_of(run.question, run.plan)
            if start_step < num_steps:
                metrics.say(show.predicted_line(price, num_steps - start_step))
            outcome = _train_in(folder, run, batches, evaluation, checkpoint, facts, metrics, packages)
            if metrics.usual_step_s is not None:
                metrics.say(show.measured_line(price, metrics.usual_step_s))
            return _ended(outcome, folder, metrics)


def work_of(run: Planned) -> Work:
    """What a step's arithmetic is counted from, with the peak of this machine, measured now."""
    dtype = torch.bfloat16 if run.config.precision == "bf16" else torch.float32
    return Work(run.spec, run.plan, matmul_flops_per_s(run.device, dtype))


def announce(run: Planned, checkpoint: Checkpoint | None, data: Iterable[str], metrics: Metrics) -> None:
    """The first lines of a run: config, precision, machine, plan, data, and where it goes on."""
    for line in show.config_lines(run.config):
        metrics.say(line)
    metrics.say(show.machine_line(run.machine))
    for line in show.plan_lines(run.spec, run.plan, run.table):
        metrics.say(line)
    for line in [*data, *show.advice_lines(run.config, run.machine)]:
        metrics.say(line)
    if run.config.save_strategy == "no":
        metrics.say("save_strategy is no: nothing is saved until the end, and a stopped run is lost")
    if checkpoint is not None:
        for damage in checkpoint.skipped:
            metrics.say(f"passed over: {damage}")
        if run.source != Path(run.config.model):
            metrics.say(f"model {run.config.model} is not there any more; config and tokenizer: {run.source}")
        metrics.say(f"going on after step {checkpoint.step}")
        keeps, kept = run.config.ema_decay is not None, has_average(checkpoint)
        if keeps and not kept:
            metrics.say(f"the average of the weights starts at those of step {checkpoint.step}, which has none")
        if kept and not keeps:
            metrics.say(f"the average of the weights, which step {checkpoint.step} has, is kept no longer")


def _checkpoint_of(
    folder: RunFolder, config: RunConfig, allowed: frozenset[str], *, must_resume: bool
) -> Checkpoint | None:
    """The checkpoint to go on from, with the run's config proven the same; None to start anew."""
    checkpoint = load_checkpoint(folder.path, "auto") if folder.checkpoints.is_dir() else None
    if checkpoint is None:
        if final_model(folder).exists():
            raise ConfigError(
                f"{folder.path} holds a trained model and no checkpoint (save_strategy: no), so it cannot go on; "
                f"choose another output_dir, with model: {final_model(folder)} to train that one further"
            )
        if must_resume:
            raise CheckpointError(f"{folder.path} holds no checkpoint to resume from; start it with megatrain train")
        return None
    if config.resume_from_checkpoint == "never":
        raise ConfigError(
            f"output_dir {folder.path} already holds step {checkpoint.step} and resume_from_checkpoint is never; "
            "choose another output_dir, or set resume_from_checkpoint to auto"
        )
    folder.refuse_changes(config, allowed)
    return checkpoint


def _done_steps(checkpoint: Checkpoint | None, num_steps: int) -> int:
    """How many of the run's steps are behind it; ConfigError if it is to have fewer than that."""
    done_steps = 0 if checkpoint is None else checkpoint.step
    if done_steps > num_steps:
        raise ConfigError(
            f"the run is to have {num_steps} steps, but {done_steps} are done; raise max_steps or num_train_epochs, or "
            "export a checkpoint"
        )
    return done_steps


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
    packages: Mapping[str, ModuleType],
) -> Outcome:
    config = run.config
    if config.memory.hbm is not None and run.device.type == "cuda":
        cap_device_memory(config.memory.hbm)
    store = store_of(run)
    if store.disk is not None and store.disk.file.note is not None:
        metrics.say(store.disk.file.note)
    if checkpoint is None:
        load_weights(run.source, store, run.spec)
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
        keep = config.save_total_limit
        writer = CheckpointWriter(
            folder.path, store, run.spec, run.hf_config, run.source, keep=keep, run_facts=dict(facts)
        )
        keeper = Keeper(writer, engine, watch, start_step)
    folder.started()
    metrics.track(lambda say: open_trackers(packages, config, folder.path, say))
    num_steps = num_steps_of(batches)
    outcome = train(
        Run(config, engine, batches, num_steps, start_step, evaluation, keeper, metrics, watch, folder.trace)
    )
    if outcome.step == num_steps or watch.exhausted:
        outcome = replace(outcome, signal=None)  # it came in the last step: there was nothing left to stop
    engine.close()
    if keeper is None and outcome.signal is None:
        target = final_model(folder)
        write_hf_folder(target, store, run.spec, run.hf_config, run.source, dtype=store.dtype("w"))
        metrics.say(f"model: {target}")
    elif keeper is not None:
        metrics.say(f"model: {folder.checkpoints / f'step-{outcome.step}' / 'model'}")
        if watch.best_step is not None:
            best = folder.checkpoints / f"step-{watch.best_step}" / "model"
            metrics.say(f"best: {best} (eval_loss {watch.best_loss:.4f})")
    store.close()
    return outcome


def _ended(outcome: Outcome, folder: RunFolder, metrics: Metrics) -> int:
    """Says how a run ended that did not end well. The exit code: 0, or 128 + the signal that stopped it.

    UserError, with all that is saved said, if it diverged.
    """
    if outcome.signal is not None:
        saved = bool(saved_steps(folder.path))
        ways_on = f"go on with: megatrain resume {folder.path}" if saved else "nothing was saved (save_strategy: no)"
        metrics.say(f"stopped after step {outcome.step}; {ways_on}")
        return 128 + outcome.signal
    if outcome.diverged:
        text = (
            f"the last {outcome.skipped} of {outcome.step} steps could not be applied: each had a NaN or Inf, and "
            f"on_nan is skip; the model is what it was after step {outcome.step - outcome.skipped}"
        )
        metrics.say(text)
        raise UserError(f"{text}: lower learning_rate, or look at the data")
    return 0


def versions() -> dict[str, str]:
    """Of what the bits of a step depend on."""
    return {"megatrain": __version__, "torch": torch.__version__, "transformers": transformers.__version__}


def environment(machine: Machine, config: RunConfig) -> dict[str, object]:
    """env.json: what the bits may depend on. No paths of the user, no variables, no tokens."""
    return {
        **versions(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "system": platform.platform(),
        "torch_threads": torch.get_num_threads(),
        "hub": sources(config),
        "machine": asdict(machine),
    }

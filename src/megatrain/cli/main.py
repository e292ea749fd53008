"""The verbs. Each imports its room when it is called, so that `--help` needs no torch.

Exit codes: 0 done; 1 the plan does not fit; 2 a mistake the user can mend; 129, 130 and 143 stopped by a
signal: a run that has begun saved everything, one that has not left nothing behind.
"""

# ruff: noqa: PLC0415 - a verb imports its room when it is called
from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperGroup

from megatrain import __version__
from megatrain.cli.ending import one_sentence, stopping_cleanly
from megatrain.cli.streams import make_streams_usable
from megatrain.errors import ConfigError

app = typer.Typer(
    name="megatrain",
    help="Trains language models far larger than GPU memory, at full precision.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Look at training data.", no_args_is_help=True)
app.add_typer(data_app, name="data")
config_app = typer.Typer(help="Look at configs, and translate those of other tools.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ConfigFile = Annotated[Path, typer.Argument(help="YAML file; docs/config.md lists the keys.", metavar="CONFIG")]
RunPath = Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")]
Words = Annotated[list[str] | None, typer.Argument(help="Keys that replace those of the file.", metavar="KEY=VALUE")]
Allow = Annotated[
    list[str] | None, typer.Option(help="Key that may differ from the run that is resumed.", metavar="KEY")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ModelPath = Annotated[
    Path, typer.Argument(help="Run folder, Hugging Face model folder, or hub name (ORG/NAME).", metavar="RUN|MODEL")
]
Step = Annotated[str, typer.Option(help="Checkpoint of a run: its number, latest, best or base.", metavar="N")]
Steps = Annotated[
    list[str] | None,
    typer.Option("--step", help="Checkpoint of a run: its number, latest, best, base or all. May be repeated."),
]
OFFLINE = "--offline"
LEAST_TEMPERATURE = 1e-4  # what a model says, divided by it, is still a number in fp32
PlanFile = Annotated[Path | None, typer.Option(help="Follow this plan.json instead of choosing.", metavar="FILE")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without a chat template.")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"megatrain {__version__}")
        raise typer.Exit


def _offline(wanted: bool) -> None:
    if wanted:
        from megatrain.cli.offline import go_offline

        go_offline()


@app.callback()
def megatrain(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    offline: Annotated[
        bool, typer.Option(OFFLINE, callback=_offline, help="Reach no network. May stand behind the verb too.")
    ] = False,
) -> None:
    """Trains language models far larger than GPU memory, at full precision."""


@app.command()
def train(config: ConfigFile, words: Words = None, allow: Allow = None, plan: PlanFile = None) -> None:
    """Train as CONFIG says; goes on where a run in its output_dir stopped."""
    from megatrain.cli.inputs import refuse_start
    from megatrain.config import allowed_keys, read_config
    from megatrain.config_run import FACTS

    wanted, allowed = read_config(config, words or ()), allowed_keys(allow or (), FACTS)
    refuse_start(wanted)

    from megatrain.cli.training import train_config  # torch is imported here: a mistake above is answered at once

    raise typer.Exit(train_config(wanted, allowed, plan_file=plan))


@app.command()
def resume(run: RunPath, words: Words = None, allow: Allow = None) -> None:
    """Go on with RUN from its newest valid checkpoint."""
    from megatrain.cli.inputs import refuse_start
    from megatrain.cli.pointed import config_to_resume
    from megatrain.config import allowed_keys
    from megatrain.config_run import FACTS

    wanted, allowed = config_to_resume(run, words or ()), allowed_keys(allow or (), FACTS)
    refuse_start(wanted)

    from megatrain.cli.training import train_config

    raise typer.Exit(train_config(wanted, allowed, must_resume=True))


@app.command()
def doctor(
    folder: Annotated[Path, typer.Argument(help="Where runs will be written.", metavar="FOLDER")] = Path("."),
    json: Json = False,
    cached: Annotated[bool, typer.Option("--cached", help="Show the last figures; measure nothing.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Rough figures in a few seconds; they are not kept.")] = False,
) -> None:
    """Measure this machine in less than a minute: what is fine, what is not, and one remedy each."""
    from megatrain.cli.doctor import doctor as verb

    def attention_rate(limit_s: float) -> float:
        from megatrain.cli.doctor_attention import attention_flops_per_s  # transformers and the compiler: 3 s

        return attention_flops_per_s(limit_s)

    raise typer.Exit(verb(folder, attention_rate, quick=quick, cached=cached, as_json=json))


@app.command()
def plan(
    config: Annotated[
        Path, typer.Argument(help="YAML file, model folder, or config.json alone.", metavar="CONFIG|MODEL_FOLDER")
    ],
    words: Words = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Plan for another machine: its machine.json, or a name that comes with MegaTrain."),
    ] = None,
    plan: PlanFile = None,
    trace: Annotated[Path | None, typer.Option(help="Lay the trace.jsonl of a real step beside it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory and lanes over a step.", metavar="FILE.svg")] = None,
    json: Json = False,
) -> None:
    """Say where every byte of a run will be, whether it fits, and what a step will cost. Loads no weights."""
    from megatrain.cli.inputs import refuse_no_model
    from megatrain.cli.wanted import config_to_plan

    wanted = config_to_plan(config, words or ())
    refuse_no_model(wanted)

    from megatrain.cli.plan import plan as verb

    raise typer.Exit(verb(wanted, machine=machine, plan_file=plan, trace=trace, plot=plot, as_json=json))


@app.command()
def export(
    run: RunPath,
    folder: Annotated[Path, typer.Argument(help="New folder for the model.", metavar="FOLDER")],
    dtype: Annotated[
        str | None, typer.Option(help="bf16 (the default), fp16, or fp32: the exact masters.", metavar="DTYPE")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Largest weight file.", metavar="SIZE")] = "5GB",
    step: Annotated[str, typer.Option(help="Checkpoint: its number, latest or best.", metavar="N")] = "latest",
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="hf: a model folder. dcp: torch.distributed.checkpoint with AdamW state.")
    ] = "hf",
    ema: Annotated[bool, typer.Option("--ema", help="The average of the weights that ema_decay kept.")] = False,
) -> None:
    """Write a checkpoint of RUN as a folder that transformers opens unchanged, or for others to train on."""
    from megatrain.cli.exported import export_asked

    asked = export_asked(run, folder, step, dtype, shard_size, format, ema=ema)

    from megatrain.cli.export_run import export as verb

    raise typer.Exit(verb(asked))


@app.command("eval")
def evaluate(
    path: ModelPath,
    words: Words = None,
    dataset: Annotated[str | None, typer.Option(help="Rows to use in place of the run's eval_dataset.")] = None,
    step: Steps = None,
    json: Json = False,
    lm_eval: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness to run instead (an extra).", metavar="TASKS")
    ] = None,
) -> None:
    """Held-out loss and perplexity of one or several checkpoints, at the run's own settings."""
    from megatrain.cli.pointed import config_to_evaluate, located

    path = located(path)
    config = config_to_evaluate(path, words or (), dataset, step or (), harness=lm_eval is not None)

    from megatrain.cli import evaluate as verb

    if lm_eval is not None:
        raise typer.Exit(verb.evaluate_by_harness(path, config, step or (), lm_eval))
    raise typer.Exit(verb.evaluate(path, config, step or (), as_json=json))


@app.command()
def chat(
    path: ModelPath,
    words: Words = None,
    prompt: Annotated[
        str | None, typer.Option(help="Ask this and end; -: all of standard input. Without it, a conversation.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one answer at most.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0: the likeliest word. Default: as the model's folder says, else 0.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Nucleus sampling.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    step: Step = "latest",
    raw: Raw = False,
) -> None:
    """Talk to a checkpoint or a model; what does not fit the GPU streams through it layer by layer."""
    from megatrain.cli.pointed import config_to_chat, located

    if raw and system is not None:
        raise ConfigError("--raw continues text as it is, so --system has no place; leave one of them out")
    if temperature is not None and 0 < temperature < LEAST_TEMPERATURE:
        raise ConfigError(
            f"temperature is {temperature:g}; give 0 for the likeliest word, or {LEAST_TEMPERATURE} or more"
        )
    path = located(path)
    config = config_to_chat(path, words or (), step)

    from megatrain.cli.chat import chat as verb
    from megatrain.models.generate import Sampling

    sampling = Sampling(max_tokens, temperature, top_p, seed)
    raise typer.Exit(verb(path, config, step, prompt, system, sampling, raw=raw))


@app.command()
def report(
    run: RunPath,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Ask the base and the newest model this. May be repeated.")
    ] = None,
    raw: Raw = False,
) -> None:
    """Write RUN/report/index.html: curves, memory, lanes, config, samples; one page that needs nothing else."""
    from megatrain.cli.report_run import config_to_report
    from megatrain.cli.report_run import report as verb

    config, samples = config_to_report(run, prompt or ()), []
    if prompt:
        from megatrain.cli.samples import samples_of

        samples = samples_of(run, config, prompt, raw=raw)
    raise typer.Exit(verb(run, samples))


@data_app.command()
def preview(config: ConfigFile, words: Words = None) -> None:
    """Show what would be trained: format, three rows with the trained text marked, lengths, rows left out."""
    from megatrain.cli.inputs import refuse_no_model, refuse_no_rows
    from megatrain.config import read_config

    wanted = read_config(config, words or ())
    refuse_no_model(wanted)
    refuse_no_rows(wanted)

    from megatrain.cli.assemble import preview_data

    raise typer.Exit(preview_data(wanted))


@config_app.command()
def show(config: ConfigFile, words: Words = None) -> None:
    """Print every key as it will be used, under its own name, with other spellings beside it."""
    from megatrain.cli.config_verbs import show_config

    raise typer.Exit(show_config(config, words or ()))


@config_app.command()
def schema() -> None:
    """Print the JSON schema of a config, for editors."""
    from megatrain.config_page import config_schema_text

    print(config_schema_text())


@config_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="YAML file of another tool.", metavar="FILE")],
    tool: Annotated[str, typer.Option("--from", help="auto, llamafactory, axolotl or megatrain-paper.")] = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="New file; without it, print.")] = None,
) -> None:
    """Translate FILE, and say what was not carried over and why."""
    from megatrain.cli.config_verbs import import_file

    raise typer.Exit(import_file(file, tool, output))


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="New config file.", metavar="FILE")] = Path("run.yaml"),
    model: Annotated[str, typer.Option(help="Hugging Face model folder.")] = "/models/NAME",
    dataset: Annotated[str, typer.Option(help="File or folder of training rows.")] = "train.jsonl",
    eval_dataset: Annotated[str | None, typer.Option(help="File or folder of held-out rows.")] = None,
) -> None:
    """Write a commented config to start from; never over another file."""
    from megatrain.cli.config_verbs import init as verb

    raise typer.Exit(verb(file, model, dataset, eval_dataset))


def _refuse_keys_as_options(words: list[str]) -> None:
    """ConfigError for `--learning_rate 1e-5`, which other tools would take: a key, and no option of the verb."""
    dashed = [word for word in words if word.startswith("--")]
    if not dashed:
        return
    verb = typer.main.get_command(app)
    for word in words:
        if isinstance(verb, TyperGroup) and word in verb.commands:
            verb = verb.commands[word]
    if all(parameter.name != "words" for parameter in verb.params):
        return
    options = {name for parameter in verb.params for name in parameter.opts}
    for word in dashed:
        name, _, value = word.partition("=")
        if name in options:
            continue
        from megatrain.config import RunConfig
        from megatrain.config_spellings import ALIASES

        key = name.removeprefix("--").replace("-", "_")
        key = ALIASES.get(key, key)
        if key in RunConfig.model_fields:
            raise ConfigError(f"{name} is no option; keys are given as KEY=VALUE, without dashes: {key}={value or '…'}")


def main() -> None:
    """The `megatrain` command: a mistake of the user is one sentence on stderr and exit code 2, never a traceback."""
    make_streams_usable()
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its old name
        # The pool grows and shrinks by pages. Else it fills a budget with pieces that fit nothing; every figure of
        # docs/performance.md was measured so.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    words = sys.argv[1:]
    if OFFLINE in words:
        words = [OFFLINE, *(word for word in words if word != OFFLINE)]
    with one_sentence(), stopping_cleanly():
        _refuse_keys_as_options(words)
        app(words)

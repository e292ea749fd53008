"""`megatrain eval`: held-out loss of checkpoints by the streaming engine; lm-evaluation-harness on a model folder."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatrain.cli.assemble import engine_of
from megatrain.cli.datasets import held_out
from megatrain.cli.named import local
from megatrain.cli.opened import Source, filled_store, planned_to_read, sources_of
from megatrain.cli.shortage import explained_shortage
from megatrain.config import RunConfig
from megatrain.errors import ConfigError, DataError
from megatrain.models.hf_folder import read_tokenizer
from megatrain.train.loop import token_batches

HARNESS = "lm_eval"
HARNESS_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class Result:
    """Of one checkpoint: mean loss over `tokens` supervised tokens, and its exponential."""

    model: str
    step: int | None
    loss: float
    perplexity: float
    tokens: int


def evaluate(path: Path, config: RunConfig, steps: Sequence[str], *, as_json: bool) -> int:
    """Print loss and perplexity of each checkpoint asked for."""
    assert config.eval_dataset is not None, "refused by config_to_evaluate"
    config = config.model_copy(update={"eval_dataset": local(config.eval_dataset, "dataset")})
    results = [_result(config, source) for source in sources_of(path, steps)]
    if as_json:
        print(json.dumps({"dataset": config.eval_dataset, "results": [_plain(result) for result in results]}, indent=1))
        return 0
    print(f"dataset: {config.eval_dataset}")
    width = max(len(Path(r.model).name if r.step is None else f"step {r.step}") for r in results)
    best = min(results, key=lambda result: result.loss)
    for result in results:
        name = Path(result.model).name if result.step is None else f"step {result.step}"
        mark = "  (lowest)" if result is best and len(results) > 1 else ""
        print(
            f"{name:<{width}}  loss {result.loss:.4f}  perplexity {result.perplexity:.4g}  "
            f"({result.tokens:,} tokens){mark}"
        )
    return 0


def _result(config: RunConfig, source: Source) -> Result:
    run = planned_to_read(config, source.folder)
    micro_batches = held_out(run.config, read_tokenizer(run.source))
    tokens = sum(m.num_supervised for m in micro_batches)
    if not tokens:
        raise DataError(f"{config.eval_dataset} has no token to predict; give another --dataset")
    with explained_shortage(run):
        store = filled_store(run)
        engine = engine_of(run, store)
        loss = engine.evaluate(token_batches(micro_batches)) / tokens
        engine.close()
        store.close()
    return Result(str(source.folder), source.step, loss, _exp(loss), tokens)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _plain(result: Result) -> dict[str, object]:
    """As JSON, which has no NaN and no Inf."""
    members = asdict(result)
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in members.items()}


def evaluate_by_harness(path: Path, config: RunConfig, steps: Sequence[str], tasks: str) -> int:
    """Run lm-evaluation-harness on the model folder of each checkpoint; its own tables are shown as it prints them.

    The harness loads the whole model through transformers, and fetches its tasks' data unless it has them.
    """
    if importlib.util.find_spec(HARNESS) is None:
        raise ConfigError('lm-eval is not installed; pip install "megatrain[eval]", or leave --lm-eval out')
    for source in sources_of(path, steps):
        run = planned_to_read(config, source.folder)
        dtype = HARNESS_DTYPES[run.config.precision]
        command = [sys.executable, "-m", HARNESS, "--model", "hf", "--tasks", tasks]
        command += ["--model_args", f"pretrained={source.folder},dtype={dtype}", "--device", run.device.type]
        print(f"{source.label}: lm-eval on {source.folder}", flush=True)
        code = subprocess.run(command, check=False).returncode
        if code:
            raise ConfigError(f"lm-eval ended with exit code {code}; its own message is above")
    return 0

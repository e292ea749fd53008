"""Held-out losses: the best step, patience, and both over a resume; BEST in the run folder; early stopping."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest

from megatrain.cli.main import main
from megatrain.train.watch import Watch


def megatrain(*words: object) -> int:
    """The exit code of `megatrain WORDS`, in this process."""
    sys.argv = ["megatrain", *map(str, words)]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_patience_counts_evaluations_without_a_better_loss() -> None:
    watch = Watch(2, 0.1, {})
    seen = [watch.see(step, loss) for step, loss in enumerate([3.0, 2.0, 1.95, 1.85, math.nan])]
    assert seen == [True, True, False, True, False]
    assert not watch.exhausted
    assert not watch.see(5, 1.80)
    assert watch.exhausted
    assert watch.verdict() == (
        "early stop: 2 evaluations in a row without a loss below 1.85 by more than 0.1 (early_stopping_patience is 2)"
    )


def test_without_patience_nothing_exhausts() -> None:
    watch = Watch(None, 0.0, {})
    for step in range(50):
        watch.see(step, 1.0)
    assert not watch.exhausted


def test_a_nan_is_never_the_best() -> None:
    watch = Watch(None, 0.0, {})
    assert not watch.see(0, math.nan)
    assert watch.saving(0) == {"num_worse_evals": 1}
    assert watch.see(1, 7.0)
    assert watch.saving(1)["best_step"] == 1


def test_the_best_is_a_saved_step() -> None:
    watch = Watch(None, 0.0, {})
    watch.see(2, 1.0)  # not saved
    watch.see(4, 2.0)
    assert watch.saving(4)["best_step"] == 4
    assert watch.saving(5)["best_step"] == 4, "step 5 was not evaluated"
    watch.see(6, 3.0)
    assert watch.saving(6)["best_step"] == 4


def test_a_resumed_watch_goes_on() -> None:
    first = Watch(3, 0.0, {})
    for step, loss in ((1, 1.0), (2, 2.0), (3, 2.0)):
        first.see(step, loss)
        state = first.saving(step)
    again = Watch(3, 0.0, json.loads(json.dumps({"step": 3, "applied_steps": 3, **state})))
    assert (again.best_step, again.best_loss, again.exhausted) == (1, 1.0, False)
    again.see(4, 1.5)
    assert again.exhausted


# The first step's learning rate is 0; those after it are far too high, so step 1 stays the best.
RISING = ("learning_rate=30", "warmup_steps=8", "lr_scheduler_type=constant", "eval_steps=1", "save_steps=1")


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: float(row["eval_loss"]) for row in rows if "eval_loss" in row}


def test_best_is_named_and_survives_pruning(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert megatrain("train", run_config, *RISING, "max_steps=3") == 0
    allow = ("--allow", "max_steps")
    assert megatrain("resume", run, "max_steps=8", *allow) == 0
    found = losses(run)
    best = min((step for step in found if step), key=lambda step: found[step])
    assert best < 7, "the test needs a best step that pruning would take"
    assert (run / "BEST").read_text() == f"checkpoints/step-{best}\n"
    kept = {path.name for path in (run / "checkpoints").iterdir()}
    assert kept == {f"step-{best}", "step-7", "step-8"}
    assert f"best: {run / 'checkpoints' / f'step-{best}' / 'model'} (eval_loss {found[best]:.4f})" in (
        capsys.readouterr().out
    )
    shutil.rmtree(run / f"checkpoints/step-{best}")
    assert megatrain("resume", run, "max_steps=9", *allow) == 0, "a best step that a person removed is no error"


def test_early_stopping_ends_a_run_and_resuming_does_not_go_on(
    run_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = (*RISING, "max_steps=40", "save_steps=100", "early_stopping_patience=2")
    assert megatrain("train", run_config, *words) == 0
    shown = capsys.readouterr().out
    last = max(losses(run))
    assert last < 40
    assert f"saved step {last}" in shown
    assert "early stop: 2 evaluations in a row without a loss below" in shown
    assert megatrain("resume", run) == 0
    assert "nothing is left to do" in capsys.readouterr().out
    assert max(losses(run)) == last
    assert megatrain("resume", run, "early_stopping_patience=4") == 0
    assert max(losses(run)) > last, "more patience goes on"


def test_strategy_best_saves_at_a_better_evaluation(run_config: Path, tmp_path: Path) -> None:
    words = ("max_steps=5", "eval_steps=2", "save_steps=100", "save_strategy=best", "save_total_limit=9")
    assert megatrain("train", run_config, *words) == 0
    found = losses(tmp_path / "run")
    assert found[4] < found[2] < found[0], "the test needs losses that fall"
    kept = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert kept == {"step-2", "step-4", "step-5"}

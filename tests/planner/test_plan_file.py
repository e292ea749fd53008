"""A plan.json that a person edited: read back exactly, and refused with a reason when it is of no use."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import PlanError
from megatrain.hardware.described import read_machine
from megatrain.planner import question_of, search
from megatrain.planner.plan_file import read_plan
from tests.planner.test_planner import config_of, spec_of

H200 = read_machine("h200-125gb")
SPEC = spec_of(4, 512)
PLAN = search(question_of(SPEC, config_of("cuda"), H200.machine, H200.rates))


def written(tmp_path: Path, table: object) -> Path:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(table))
    return file


@pytest.mark.parametrize("wrap", [lambda plan: plan, lambda plan: {"verdict": "FITS", "plan": plan}])
def test_what_plan_prints_is_read_back(tmp_path: Path, wrap: Callable[[object], object]) -> None:
    assert read_plan(written(tmp_path, wrap(asdict(PLAN))), SPEC) == PLAN


def edited(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    table = json.loads(json.dumps(asdict(PLAN)))
    change(table)
    return table


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.update(wight_slots=3), "unknown key 'wight_slots'; Plan has segments"),
        (lambda t: t["segments"][1].update(home="ram"), "unknown key 'home'; SegmentPlan has name"),
        (lambda t: t.update(weight_slots="two"), r"weight_slots is 'two'"),
        (lambda t: t["segments"][1].update(state="tape"), r"segments.1.state is 'tape'"),
        (lambda t: t["segments"].pop(2), "list EMBED, L000"),
        (lambda t: t["segments"][1].update(weights="pool", state="hbm"), "L000 has weights 'pool'"),
        (lambda t: t["segments"][1].update(trainable=False, state="ram"), "trainable of L000 is False"),
        (lambda t: t.update(tied=False), "says tied is False, the model's is True"),
        (lambda t: t.update(embedding_trainable=False), "embedding_trainable is False"),
    ],
)
def test_an_edit_that_no_run_could_follow_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        read_plan(written(tmp_path, edited(change)), SPEC)


def test_a_plan_of_another_model_and_no_plan_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is for 4 blocks, the model has 6"):
        read_plan(written(tmp_path, asdict(PLAN)), spec_of(6, 512))
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.json", SPEC)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PlanError, match="is no JSON"):
        read_plan(tmp_path / "bad.json", SPEC)
    with pytest.raises(PlanError, match="dictionary"):
        read_plan(written(tmp_path, [1, 2]), SPEC)


def test_an_allowed_edit_is_followed(tmp_path: Path) -> None:
    file = written(tmp_path, edited(lambda t: t.update(weight_slots=4, round_micro_batches=1)))
    assert read_plan(file, SPEC) == replace(PLAN, weight_slots=4, round_micro_batches=1)


def test_attention_of_a_block_that_attends_twice_cannot_be_kept(tmp_path: Path) -> None:
    file = written(tmp_path, edited(lambda t: t["segments"][2].update(activations="keep_attention")))
    assert read_plan(file, SPEC).blocks[1].activations == "keep_attention"
    twice = replace(SPEC, attention=tuple(replace(shape, num_calls=2) for shape in SPEC.attention))
    with pytest.raises(PlanError, match=r"L001 has activations 'keep_attention'.*attends more than once.*'recompute'"):
        read_plan(file, twice)

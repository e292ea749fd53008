"""A plan.json that a person edited: read back exactly, and refused with a reason when it is of no use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import PlanError
from megatrain.hardware.described import read_machine
from megatrain.models.spec import ModelSpec
from megatrain.planner import Question, question_of, search
from megatrain.planner.plan_file import read_plan
from megatrain.schedule.plan import Activations, Plan
from tests.planner.test_planner import config_of, spec_of

H200 = read_machine("h200-125gb")
SPEC = spec_of(4, 512)


def asked(spec: ModelSpec = SPEC, **keys: object) -> Question:
    return question_of(spec, config_of("cuda", **keys), H200.machine, H200.rates)


PLAN = search(asked())
STEP = {"train_batch_size": 4, "micro_batch_tokens": 512}  # of four micro-batches
TWO_PASS = replace(search(asked(**STEP)), round_micro_batches=4, clip_mode="two-pass", grad_landing_slots=2)


def written(tmp_path: Path, table: object) -> Path:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(table))
    return file


@pytest.mark.parametrize("wrap", [lambda plan: plan, lambda plan: {"verdict": "FITS", "plan": plan}])
def test_what_plan_prints_is_read_back(tmp_path: Path, wrap: Callable[[object], object]) -> None:
    assert read_plan(written(tmp_path, wrap(asdict(PLAN))), asked()) == PLAN


def doing(activations: Activations, others: Activations = "recompute") -> Plan:
    """The plan with the second block doing this."""
    ways = {"EMBED": "recompute", "L001": activations, "HEAD": "recompute"}
    return replace(PLAN, segments=tuple(replace(s, activations=ways.get(s.name, others)) for s in PLAN.segments))


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
        (lambda t: t.update(weight_slots=True), "weight_slots is True: input should be a valid integer"),
        (lambda t: t.update(weight_slots=2.0), "weight_slots is 2.0: input should be a valid integer"),
        (lambda t: t.update(weight_slots=10_000_000), "weight_slots is 10000000; use 0 to 6"),
        (lambda t: t.update(tied=1), "tied is 1: input should be a valid boolean"),
        (lambda t: t["segments"][0].update(activations="keep"), "EMBED has activations 'keep'; only blocks"),
        (lambda t: t["segments"][1].update(state="tape"), r"segments.1.state is 'tape'"),
        (lambda t: t["segments"].pop(2), "list EMBED, L000"),
        (lambda t: t["segments"][1].update(weights="pool", state="hbm"), "L000 has weights 'pool'"),
        (lambda t: t["segments"][1].update(trainable=False, state="ram"), "trainable of L000 is False"),
        (lambda t: t.update(tied=False), "says tied is False, for this model and config it is True"),
        (lambda t: t.update(embedding_trainable=False), "embedding_trainable is False"),
    ],
)
def test_an_edit_that_no_run_could_follow_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        read_plan(written(tmp_path, edited(change)), asked())


def test_a_plan_of_another_model_and_no_plan_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="is for 4 blocks, the model has 6"):
        read_plan(written(tmp_path, asdict(PLAN)), asked(spec_of(6, 512)))
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.json", asked())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[1, 2]", "a JSON object is expected, not list"),
        ('{"plan": 5}', "all of it is 5: input should be an object"),
        ('{"segments": 5}', "segments is 5: input should be a valid array"),
        ('{"segments": null}', "segments is None: input should be a valid array"),
        ('{"segments": [5]}', "segments.0 is 5: input should be an object"),
        ('{"segments": {"name": "EMBED"}}', "segments is {'name': 'EMBED'}: input should be a valid array"),
        ('{"segments": []}', "tied is missing"),
        ('{"tied": true, "tied": false}', "key 'tied' appears twice"),
        ('{"plan": {"segments": [{"name": "EMBED", "name": "HEAD"}]}}', "key 'name' appears twice"),
    ],
)
def test_a_file_that_is_no_plan_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(PlanError, match=f"bad.json: .*{re.escape(said)}.*; `megatrain plan --json` writes such a file"):
        read_plan(tmp_path / "bad.json", asked())


@pytest.mark.parametrize(
    ("plan", "keys", "said"),
    [
        (TWO_PASS, {"clip_mode": "deferred"}, "clip_mode two-pass, the config asks for deferred"),
        (PLAN, {"clip_mode": "two-pass"}, "clip_mode deferred, the config asks for two-pass"),
        (PLAN, {"clip_mode": "two-pass", "round_micro_batches": 1}, "clip_mode deferred, the config asks for two-pass"),
        (TWO_PASS, {"round_micro_batches": 1}, "round_micro_batches 4, the config asks for 1"),
        (replace(PLAN, round_micro_batches=1), {"round_micro_batches": 3}, "round_micro_batches 1, the config .* 3"),
        (replace(PLAN, weight_slots=2), {"weight_slots": 3}, "weight_slots 2, the config asks for 3"),
        (doing("recompute", "keep"), {"activations": "keep"}, "activations recompute of L001, the config"),
        (doing("keep"), {"activations": "recompute"}, "activations keep of L001, the config asks for recompute"),
        (doing("keep_attention"), {"activations": "recompute"}, "activations keep_attention of L001, the config"),
    ],
)
def test_a_wish_of_the_config_is_not_left_out(tmp_path: Path, plan: Plan, keys: dict[str, object], said: str) -> None:
    key = next(iter(keys))
    with pytest.raises(PlanError, match=rf"plan.json has {said}.*change one of them, or leave {key} out of the config"):
        read_plan(written(tmp_path, asdict(plan)), asked(**STEP, **keys))
    assert read_plan(written(tmp_path, asdict(plan)), asked(**STEP)) == plan, "which the config leaves to the plan"


@pytest.mark.parametrize(
    ("plan", "keys"),
    [
        (TWO_PASS, {"clip_mode": "two-pass", "round_micro_batches": 9}),
        (replace(PLAN, weight_slots=3, round_micro_batches=9), {"weight_slots": 3, "round_micro_batches": 4}),
        (replace(doing("offload"), act_slots=2), {"activations": "recompute"}),
        (PLAN, {"deterministic": False, "clip_mode": "deferred"}),
    ],
)
def test_a_plan_that_honours_every_wish_is_followed(tmp_path: Path, plan: Plan, keys: dict[str, object]) -> None:
    assert read_plan(written(tmp_path, asdict(plan)), asked(**STEP, **keys)) == plan


@pytest.mark.parametrize("keys", [{}, {"clip_mode": "two-pass"}, {"clip_mode": "deferred"}, {"activations": "keep"},
    {"activations": "recompute"}, {"weight_slots": 3}, {"round_micro_batches": 3}, {"deterministic": False},
    {"freeze": ("embed_tokens",)}])  # fmt: skip
@pytest.mark.parametrize("hbm_free_bytes", [140 << 30, 2 << 30])
def test_what_is_chosen_for_a_config_honours_it(tmp_path: Path, keys: dict[str, object], hbm_free_bytes: int) -> None:
    spec = spec_of(4, 512, freeze=keys.get("freeze", ()))
    question = replace(asked(spec, **STEP, **keys), machine=replace(H200.machine, hbm_free_bytes=hbm_free_bytes))
    plan = search(question)
    assert read_plan(written(tmp_path, asdict(plan)), question) == plan


def test_two_passes_need_the_same_gradients_twice_and_a_round_of_the_whole_step(tmp_path: Path) -> None:
    file = written(tmp_path, asdict(TWO_PASS))
    with pytest.raises(PlanError, match=r"clip_mode is two-pass and deterministic is false: .*; set deterministic"):
        read_plan(file, asked(**STEP, deterministic=False))
    larger = asked(**(STEP | {"train_batch_size": 5}))
    with pytest.raises(PlanError, match=r"round_micro_batches 4, but two passes take the 5 .*; set it to 5, or"):
        read_plan(file, larger)


def test_an_allowed_edit_is_followed(tmp_path: Path) -> None:
    file = written(tmp_path, edited(lambda t: t.update(weight_slots=4, round_micro_batches=1)))
    assert read_plan(file, asked()) == replace(PLAN, weight_slots=4, round_micro_batches=1)


def test_attention_of_a_block_that_attends_twice_cannot_be_kept(tmp_path: Path) -> None:
    file = written(tmp_path, edited(lambda t: t["segments"][2].update(activations="keep_attention")))
    assert read_plan(file, asked()).blocks[1].activations == "keep_attention"
    twice = replace(SPEC, attention=tuple(replace(shape, num_calls=2) for shape in SPEC.attention))
    with pytest.raises(PlanError, match=r"L001 has activations 'keep_attention'.*attends more than once.*'recompute'"):
        read_plan(file, asked(twice))

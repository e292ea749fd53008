"""`python -m bench plans`: its settings are what they claim to be, and a tiny one runs on a CPU from plan to line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from bench import plan_run, planning, plans
from bench.plan_again import again, recorded
from bench.plan_settings import PLAIN, PLAIN_KEEP, SETTINGS, Setting
from megatrain.cli.assemble import Planned
from megatrain.hardware.described import read_machine
from megatrain.planner import predict, sizes
from megatrain.planner.price import price_of
from megatrain.planner.table import TIERS

H200 = read_machine("h200-125gb")
TINY = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
QUICK = ("--warm", "0", "--again-warm", "0", "--steps", "2")
RAN = Setting("tiny", "llama-3-8b", 2, 32, 128, fields=TINY, micro_batch_tokens=64, against=(PLAIN, PLAIN_KEEP))
BROKEN = Setting("broken", "llama-3-8b", 2, 32, 128, {"hbm": "1GiB"}, fields=TINY)  # a CPU has no HBM: refused
SHORT = Setting("short", "llama-3-8b", 2, 32, 128, {"ram": "1MiB"}, fields=TINY)


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Planned]:
    """What the planner chooses for every setting on the machine that they are meant for."""
    folder = tmp_path_factory.mktemp("plans")
    return {setting.name: plans.plan_of(setting, folder, H200) for setting in SETTINGS}


def test_there_are_settings_of_every_kind_and_all_fit_one_h200(chosen: Mapping[str, Planned]) -> None:
    assert len(chosen) == len(SETTINGS) >= 14
    assert {run.table.overall for run in chosen.values()} == {"FITS"}
    assert all(run.table.total_bytes("disk") < 40e9 for run in chosen.values())
    every = [segment for run in chosen.values() for segment in run.plan.segments]
    assert {segment.state for segment in every} == {"hbm", "ram", "disk"}
    assert {segment.activations for segment in every} >= {"keep", "recompute", "offload"}
    assert {run.plan.clip_mode for run in chosen.values()} == {"deferred", "two-pass"}
    assert any(run.plan.tied for run in chosen.values())
    assert {setting.memory.get("hbm") for setting in SETTINGS} >= {"8GiB", "12GiB", "24GiB", "48GiB", None}
    assert {setting.step_tokens for setting in SETTINGS} >= {8192, 32768, 65536, 131072}


def test_rounds_with_two_and_with_three_gradient_slots_differ_in_nothing_else(chosen: Mapping[str, Planned]) -> None:
    """Run one after the other, they say what a third slot is worth: as predicted, 7 % of the step for one slot of HBM
    that both budgets have."""
    two, three = chosen["rounds-2-slots"], chosen["rounds-3-slots"]
    assert three.plan == replace(two.plan, grad_slots=3)
    assert (two.plan.grad_slots, two.plan.round_micro_batches) == (2, 1)
    block = max(layout.num_trainable for name, layout in three.question.shapes.layouts.items() if name.startswith("L"))
    more = {tier: three.table.total_bytes(tier) - two.table.total_bytes(tier) for tier in TIERS}
    assert more == {"hbm": 4 * block, "ram": 0, "disk": 0}
    seconds = [price_of(run.question, run.plan).prediction.step_s for run in (two, three)]
    assert 0.9 < seconds[1] / seconds[0] < 0.97, seconds


def test_the_settings_of_updates_that_pass_differ_in_nothing_else(chosen: dict[str, Planned]) -> None:
    """As predicted the CPU's rate bounds one and not the other; without state slots there is HBM to spare."""
    some, none = chosen["passing"], chosen["passing-none"]
    passing = [segment.name for segment in some.plan.segments if segment.streams_state]
    assert len(passing) >= 3
    home = tuple(replace(segment, update="home") for segment in some.plan.segments)
    assert none.plan == replace(some.plan, segments=home, state_slots=0)
    some_s, none_s = (predict(run.question.work, run.plan).step_s for run in (some, none))
    assert 0.80 < some_s / none_s < 0.95
    assert some.table.total_bytes("ram") == none.table.total_bytes("ram") < 100 << 30


def test_passing_is_held_against_the_best_plan_without_it(chosen: dict[str, Planned]) -> None:
    """What HBM the state slots would take, the planner gives to blocks that stay."""
    some, none, off = chosen["passing"], chosen["passing-none"], chosen["passing-off"]
    assert not any(segment.streams_state for segment in off.plan.segments)
    assert off.question.budgets == some.question.budgets
    seconds = [predict(run.question.work, run.plan).step_s for run in (some, off, none)]
    assert seconds == sorted(seconds), seconds
    assert seconds[0] < 0.95 * seconds[1]


def test_all_settings_together_are_quick_enough_for_one_call(chosen: Mapping[str, Planned]) -> None:
    """By the planner's word: each a first step, two seconds or steps of warm ones, and five timed ones or 8 seconds."""
    seconds = [price_of(run.question, run.plan).prediction.step_s for run in chosen.values()]
    running_s = sum(s + max(2.0, 2 * s) + min(5 * s, max(8.0, 2 * s)) for s in seconds)
    assert running_s < 220  # beside nine seconds of start for each


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The result lines of a run in which one setting cannot be planned and one does not fit."""
    folder = tmp_path_factory.mktemp("results")
    code = plans.main(["--results", str(folder), *QUICK], settings=(BROKEN, SHORT, RAN))
    assert code == 1
    (file,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_what_fails_is_recorded_and_the_rest_goes_on(lines: list[dict[str, Any]]) -> None:
    told = [(line["setting"], line["system"], "failed" in line) for line in lines]
    assert told == [
        ("broken", "megatrain", True),
        ("short", "megatrain", True),
        ("tiny", "megatrain", False),
        ("tiny", PLAIN, False),
        ("tiny", PLAIN_KEEP, False),
    ]
    assert "memory.hbm" in lines[0]["failed"]
    assert lines[1]["verdict"] == "NO"


def test_a_line_has_what_was_predicted_beside_what_was_measured(lines: list[dict[str, Any]]) -> None:
    (line,) = [line for line in lines if line["setting"] == "tiny" and line["system"] == "megatrain"]
    assert line["bench"] == "plans"
    assert 0 < line["step_s_min"] <= line["step_s"] <= line["step_s_max"]
    assert line["steps"] == 2
    assert line["step_ratio"] == pytest.approx(line["step_s"] / line["predicted_step_s"])
    assert line["ram_ratio"] == pytest.approx(line["peak_ram_bytes"] / line["predicted_bytes"]["ram"])
    assert line["peak_ram_bytes"] >= max(at["rss"] for at in line["marks"].values())
    assert list(line["marks"]) == ["begun", "capped", "stored", "first step", "end"]
    assert sum(line["rows"].values()) == sum(line["predicted_bytes"].values())
    assert sum(line["plan"]["segments"].values()) == 4
    assert line["lanes"]["compute"] > 0
    assert line["lanes"]["host"] > 0


def test_a_line_holds_all_that_its_prediction_follows_from(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    """Predicted again, by the same constants, nothing differs; a line of before is left out and counted."""
    file, old = tmp_path / "lines.jsonl", [{k: v for k, v in line.items() if k != "made_of"} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in (*old, *lines)), "utf-8")
    (row,), without = recorded(file)
    assert (row["setting"], without) == ("tiny", 1)
    made = again(row)
    assert made.prediction.step_s == pytest.approx(row["predicted_step_s"])
    assert {tier: made.table.total_bytes(tier) for tier in row["predicted_bytes"]} == row["predicted_bytes"]
    assert dict(made.table.budgets) == row["budget_bytes"]
    assert made.step_ratio * row["step_ratio"] == pytest.approx(1)
    assert plans.summary(made.plan) == row["plan"]


def test_other_constants_predict_other_bytes_and_seconds(
    lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = [line for line in lines if "made_of" in line and "step_s" in line]
    monkeypatch.setattr(sizes, "PROGRAM_RAM_BYTES", {"cpu": sizes.PROGRAM_RAM_BYTES["cpu"] + 1000})
    slower = row["made_of"]["rates"] | {"matmul_flops_per_s": row["made_of"]["rates"]["matmul_flops_per_s"] / 2}
    made = again({**row, "made_of": row["made_of"] | {"rates": slower}})
    assert made.table.total_bytes("ram") == row["predicted_bytes"]["ram"] + 1000
    assert made.prediction.step_s > row["predicted_step_s"]


def test_the_page_has_a_line_for_every_recorded_plan(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({**line, "peak_hbm_bytes": 1}) + "\n" for line in lines), "utf-8")
    assert [line["process"] for line in lines if "step_s" in line and line["system"] == "megatrain"] == ["own"]
    table = list(planning.plans_backtest(file))
    assert len(table) == 2 + 1 + 2
    assert table[2].startswith(f"| tiny (run {lines[0]['run']}) | ")
    assert table[-1].startswith("Left out: 0 measured lines")


@dataclass(frozen=True)
class Deadly(Setting):
    """Ends the process that measures it, as the kernel does when memory is short."""

    def model_config(self) -> PreTrainedConfig:
        os._exit(9)


@pytest.mark.slow  # 16 s: two processes start
def test_a_measurement_that_is_killed_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    """So each is in a process of its own."""
    assert plans.main(["--results", str(tmp_path), *QUICK], settings=(Deadly("deadly", "x", 2, 32, 128), SHORT)) == 1
    (file,) = tmp_path.glob("*.jsonl")
    first, second = (json.loads(line) for line in file.read_text("utf-8").splitlines())
    assert (first["setting"], first["failed"].split(":")[0]) == ("deadly", "BrokenProcessPool")
    assert second["setting"] == "short"


def test_time_that_is_up_begins_nothing_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plans.main(["--results", str(tmp_path), "--limit-s", "0", *QUICK], settings=(RAN,)) == 0
    assert list(tmp_path.iterdir()) == []
    assert "time is up" in capsys.readouterr().out


def test_a_setting_is_held_against_the_best_plain_step_of_its_shape() -> None:
    same = Setting("capped", "llama-3-8b", 2, 32, 128, {"ram": "8GiB"}, 64, TINY, (PLAIN,))
    rows = [("tiny", "megatrain", 2.0), ("tiny", PLAIN, 3.0), ("tiny", PLAIN_KEEP, 1.0), ("capped", "megatrain", 4.0)]
    made = [{"setting": name, "system": system, "step_s": s} for name, system, s in rows]
    first, second = plans.against_plain(made, (RAN, same))
    assert first.startswith("tiny: 0.500 x")
    assert second.startswith("capped: 0.750 x"), "what keeps its activations is not what it is to be held against"


def test_timed_steps_are_as_many_as_asked_or_as_time_allows() -> None:
    calls: list[str] = []
    steps = plan_run.timed(lambda: calls.append("step"), plan_run.Pace(0.0, 5, 60.0), lambda: calls.append("first"))
    assert len(steps) == 5
    assert calls == ["step", "first", "step", *["step"] * 5]
    assert len(plan_run.timed(lambda: None, plan_run.Pace(0.0, 5, 0.0), lambda: None)) == 2


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SystemExit, match="no setting is called nonsense"):
        plans.main(["--only", "nonsense"])

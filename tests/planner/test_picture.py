"""Memory over a step, and its picture: the peak is the planned one, every op is drawn where it ran."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from megatrain.hardware.described import read_machine
from megatrain.planner import Question, memory_table, predict, question_of, search
from megatrain.planner.account import framework_bytes
from megatrain.planner.chart import LEFT, RIGHT, WIDTH, chart
from megatrain.planner.occupancy import occupancy
from megatrain.planner.traced import spans_of
from megatrain.schedule import Plan, build, simulate
from tests.planner.test_planner import config_of, spec_of

H200 = read_machine("h200-125gb")
SVG = "{http://www.w3.org/2000/svg}"


def question(hbm_gib: float, **keys: object) -> Question:
    machine = replace(H200.machine, hbm_free_bytes=int(hbm_gib * 2**30))
    config = config_of("cuda", **{"max_length": 1024, "micro_batch_tokens": 4096, "save_strategy": "no", **keys})
    return question_of(spec_of(8, 2048, tied=False, vocab_size=50_000), config, machine, H200.rates)


def whole_step(asked: Question, plan: Plan):
    costs = asked.work.costs
    schedule = build(plan, "train", asked.num_micro_batches, True)
    made = simulate(schedule, costs.seconds)
    return schedule, list(zip(made.start_s, made.finish_s, strict=True))


@pytest.mark.parametrize(
    ("hbm_gib", "keys"),
    [
        (5.5, {"activations": "recompute"}),
        (9, {"activations": "recompute", "train_batch_size": 16}),
        (30, {"activations": "keep", "train_batch_size": 16}),
        (30, {}),
        (16, {"train_batch_size": 256}),
    ],
)
def test_the_peak_over_a_step_is_the_planned_one(hbm_gib: float, keys: dict[str, object]) -> None:
    """Never above what the table reserves, and not far below: else the table would waste memory."""
    asked = question(hbm_gib, **keys)
    plan = search(asked)
    table = memory_table(asked, plan)
    assert table.overall == "FITS"
    made = predict(asked.work, plan)
    shown = occupancy(asked, plan, made.schedule, made.times_s, plan.round_micro_batches)  # an op a visit
    for levels in (shown, occupancy(asked, plan, *whole_step(asked, plan))):
        peak = max(level.num_bytes for level in levels["hbm"])
        assert 0.75 * table.total_bytes("hbm") <= peak <= table.total_bytes("hbm")
        assert max(level.num_bytes for level in levels["ram"]) <= table.total_bytes("ram")


def test_memory_falls_back_to_what_lives_on() -> None:
    asked = question(30)
    plan = search(asked)
    levels = occupancy(asked, plan, *whole_step(asked, plan))["hbm"]
    times_s = [level.time_s for level in levels]
    assert times_s == sorted(times_s)
    homes = levels[-1].num_bytes
    assert homes <= min(level.num_bytes for level in levels)
    resident = [asked.shapes.layouts[s.name] for s in plan.segments if s.state == "hbm"]
    of_framework = sum(framework_bytes(asked, plan).values())
    assert homes == pytest.approx(12 * sum(layout.num_elements for layout in resident) + of_framework)
    assert of_framework > (860 + 128) * 2**20


def test_every_op_is_drawn_where_it_ran() -> None:
    asked = question(5.5, activations="recompute")
    plan = search(asked)
    made = predict(asked.work, plan)
    times_s = list(made.times_s)
    spans = spans_of(made.schedule, times_s)
    levels = occupancy(asked, plan, made.schedule, times_s, asked.num_micro_batches)
    root = ET.fromstring(chart("<a step>", spans, levels, memory_table(asked, plan).budgets))
    bars = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(bars) == len(made.schedule)
    end_s = max(end for _, end in made.times_s)
    for rect in bars:
        assert LEFT <= float(rect.get("x", "0")) <= WIDTH - RIGHT
    first = next(rect for rect in bars if "FORWARD L000" in ET.tostring(rect, encoding="unicode"))
    start_s = next(span.start_s for span in spans if (span.kind, span.segment) == ("FORWARD", "L000"))
    assert float(first.get("x", "0")) == pytest.approx(LEFT + (WIDTH - LEFT - RIGHT) * start_s / end_s, abs=0.01)
    text = " ".join(element.text or "" for element in root.iter(f"{SVG}text"))
    assert "<a step>" in text
    assert "peak" in text
    for lane in ("compute", "h2d", "d2h", "host"):
        assert lane in text

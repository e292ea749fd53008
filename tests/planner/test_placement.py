"""The benchmark's words for a placement: the planner's own choice goes through them and comes back the same."""

from __future__ import annotations

from itertools import pairwise

import pytest

from bench.placement import make_plan, placed, plan_of, planned, question
from bench.presets import PRESETS
from bench.step import Timing, load_config, parse, row
from megatrain.models.spec_of import model_spec
from megatrain.planner import memory_table, predict, search
from megatrain.schedule import Lane

LINE = "--machine h200-125gb --disk-gib 55 --systems megatrain/planned"


@pytest.mark.parametrize(
    "words",
    ["--model llama-3-8b", "--model llama-3-8b --tokens 262144 --hbm-gib 24", "--model dense-20b --tokens 32768"],
)
def test_what_the_planner_chooses_is_made_of_words_again(words: str) -> None:
    args = parse([*words.split(), *LINE.split()])
    spec = model_spec(load_config(args))
    asked = placed(args, "planned")
    plan = search(question(spec, asked))
    assert make_plan(spec, planned(spec, asked), 99) == plan


def test_a_dense_model_of_20b_on_one_h200_keeps_its_disk_busy_nearly_all_the_time() -> None:
    """125 GiB of RAM and 60 GB of disk: the states that neither memory holds lie far apart, in two landing slots."""
    assert PRESETS["dense-20b"]["hidden_size"] == 6144
    args = parse(["--model", "dense-20b", "--tokens", "32768", *LINE.split()])
    asked = question(model_spec(load_config(args)), args)
    plan = search(asked)
    assert memory_table(asked, plan).overall == "FITS"
    assert (plan.clip_mode, plan.disk_slots) == ("two-pass", 2)
    on_disk = [index for index, segment in enumerate(plan.segments) if segment.state_on_disk]
    assert all(after - before >= 4 for before, after in pairwise(on_disk))
    made = predict(asked.work, plan)
    work_s = 2 * len(on_disk) * 10 * (6144 * (2 * 6144 + 2 * 1024 + 3 * 16384) / 1.7e9)
    assert made.lanes_s[Lane.COMPUTE] < work_s < made.step_s < 1.12 * work_s


def test_all_that_the_gpu_does_is_counted_by_placement() -> None:
    """Blocks that keep nothing compute their forward twice; a step in two passes goes backward twice."""
    timing = Timing((1.0,), None, {}, 0.0)

    def tflops(system: str, words: str = "", placement: str = "") -> tuple[object, object]:
        args = placed(parse(["--model", "llama-3-8b", *words.split()]), placement)
        spec = model_spec(load_config(args))
        found = row(args, spec, system, plan_of(spec, args, system, 1), timing, 1)
        return found["hardware_tflops"], found["model_tflops"]

    (all_again, useful), (half_again, _) = tflops("megatrain"), tflops("megatrain", placement="keep_blocks=L000-L015")
    assert tflops("megatrain", placement="keep_blocks=all") == (useful, useful)
    assert half_again == pytest.approx((all_again + useful) / 2)
    assert tflops("megatrain", "--clip-mode two-pass")[0] == pytest.approx(all_again + useful)
    assert tflops("plain", "--clip-mode two-pass") == tflops("plain"), "a plain loop keeps its gradients"
    assert tflops("plain", placement="keep_blocks=all") == (all_again, useful)
    assert tflops("plain-keep") == (useful, useful)

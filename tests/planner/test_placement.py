"""The benchmark's words for a placement: the planner's own choice goes through them and comes back the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.placement import make_plan, placed, plan_of, planned, question
from bench.presets import PRESETS
from bench.step import Timing, load_config, parse, row
from megatrain.models.spec_of import model_spec
from megatrain.planner import Question, memory_table, predict, search
from megatrain.schedule import Kind, Lane

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


def dense_20b(tokens: int, ram_gib: float) -> Question:
    """What the planner is asked for a step of the 20B model on one H200, with as much of its RAM free."""
    assert PRESETS["dense-20b"]["hidden_size"] == 6144
    args = parse(["--model", "dense-20b", "--tokens", str(tokens), *LINE.split()])
    asked = question(model_spec(load_config(args)), args)
    return replace(asked, machine=replace(asked.machine, ram_available_bytes=int(ram_gib * 2**30)))


STATE_BYTES = 10 * 6144 * (2 * 6144 + 2 * 1024 + 3 * 16384)  # of one block
READ_AND_WRITE_S = STATE_BYTES / 1.87e9 + STATE_BYTES / 2.25e9  # by the drive of h200-125gb


def test_two_states_of_20b_that_no_memory_holds_are_as_far_apart_as_can_be_and_the_disk_hides_behind_the_gpu() -> None:
    """One landing slot: a second one would put a third state on the disk. 12.5 s were measured with three in two."""
    asked = dense_20b(16384, 124.4)
    plan = search(asked)
    assert memory_table(asked, plan).overall == "FITS"
    assert (plan.clip_mode, plan.disk_slots, plan.spilled_late) == ("two-pass", 1, (("L000", 0),))
    assert [s.name for s in plan.segments if s.state_on_disk] == ["L000", "L047"]
    made = predict(asked.work, plan)
    busiest_s = max(made.lanes_s[Lane.COMPUTE], 2 * READ_AND_WRITE_S)
    assert busiest_s < made.step_s < 1.10 * busiest_s


def test_a_dense_model_of_20b_on_one_h200_keeps_its_disk_busy_in_all_of_its_second_pass() -> None:
    """Six states in one slot: what must be read and written between the first update and the last is all there is to
    wait for."""
    asked = dense_20b(32768, 120)
    plan = search(asked)
    assert memory_table(asked, plan).overall == "FITS"
    assert (plan.clip_mode, plan.disk_slots) == ("two-pass", 1)
    on_disk = [index for index, segment in enumerate(plan.segments) if segment.state_on_disk]
    assert (on_disk[0], on_disk[-1]) == (1, 48)
    gaps = [after - before for before, after in pairwise(on_disk)]
    assert max(gaps) - min(gaps) <= 2
    made = predict(asked.work, plan)
    first_pass_s = next(
        end_s for op, (_, end_s) in zip(made.schedule, made.times_s, strict=True) if op.kind is Kind.CLIP
    )
    between_s = (len(on_disk) - 1) * READ_AND_WRITE_S
    assert first_pass_s + between_s < made.step_s < 1.05 * (first_pass_s + between_s)


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

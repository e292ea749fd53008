"""The search: more memory never gives a slower plan, whatever is short; and it is quick."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatrain.config import RunConfig, resolved
from megatrain.hardware import Machine
from megatrain.hardware.described import read_machine
from megatrain.models.spec import AttentionShape, ModelSpec
from megatrain.planner import (
    Prediction,
    Question,
    Workload,
    cheapest,
    least_bytes,
    memory_table,
    predict,
    question_of,
    search,
)
from megatrain.planner.cheapest import cost_s, lightest, wear_s
from megatrain.planner.family import (
    _in_passes,
    _streamed,
    _with_residents,
    filled,
    fillings,
    placed,
    without_idle_slots,
)
from megatrain.planner.floor import Floor
from megatrain.planner.parts import Parts
from megatrain.planner.passes import Link, Travel
from megatrain.planner.room import border
from megatrain.schedule import build
from megatrain.schedule.ops import Lane
from megatrain.schedule.plan import Plan, validate
from tests.planner.test_planner import spec_of
from tests.stopwatch import quiet_s

GIB = 1 << 30
H200 = read_machine("h200-125gb")
SMALL = spec_of(10, 2048, tied=False, vocab_size=50_000)


def question(spec: ModelSpec = SMALL, machine: Machine = H200.machine, **keys: object) -> Question:
    base = {"model": "m", "dataset": "d", "max_length": 2048, "micro_batch_tokens": 4096, "save_strategy": "no", **keys}
    return question_of(spec, resolved(RunConfig(**base), "cuda", 16), machine, H200.rates)


def with_memory(asked: Question, hbm_gib: float, ram_gib: float, disk_gib: float = GIB) -> Question:
    free = {"hbm_free_bytes": hbm_gib, "ram_available_bytes": ram_gib, "disk_free_bytes": disk_gib}
    return replace(asked, machine=replace(asked.machine, **{field: int(gib * GIB) for field, gib in free.items()}))


@settings(max_examples=7, deadline=None)
@given(
    hbm=st.tuples(st.floats(4, 40), st.floats(4, 40)),
    ram=st.tuples(st.floats(4.5, 9), st.floats(4.5, 9)) | st.tuples(st.floats(6, 40), st.floats(6, 40)),
    disk=st.tuples(st.floats(0, 12), st.floats(0, 12) | st.just(1000.0)),
    rows=st.sampled_from([2, 8, 24]),
    length=st.sampled_from([1024, 4096]),
    activations=st.sampled_from(["auto", "recompute"]),
)
@example(hbm=(6.0, 6.0), ram=(7.5, 8.8), disk=(3.0, 8.0), rows=8, length=4096, activations="auto")  # both on disk
@example(hbm=(11.0, 40.0), ram=(6.0, 38.0), disk=(0.0, 0.0), rows=24, length=1024, activations="recompute")  # 0.7 %
@example(hbm=(7.0, 10.0), ram=(14.0, 38.0), disk=(9.0, 2.0), rows=24, length=4096, activations="auto")
def test_more_memory_never_gives_a_costlier_or_slower_plan(
    hbm: tuple[float, float],
    ram: tuple[float, float],
    disk: tuple[float, float],
    rows: int,
    length: int,
    activations: str,
) -> None:
    """A step may be 1 % slower for what it no longer does beside the device: with activations recomputed it is 0.7 %
    where updates that the host hid are done on the device."""
    asked = question(train_batch_size=rows, max_length=length, activations=activations)
    less, more = (with_memory(asked, end(hbm), end(ram), end(disk)) for end in (min, max))
    small, large = search(less), search(more)
    for plan in (small, large):
        validate(plan)
    if memory_table(less, small).overall == "FITS":
        assert memory_table(more, large).overall == "FITS"
        assert cost_s(more, large) <= cost_s(more, small) * (1 + 1e-9)
        assert predict(asked.work, large).step_s <= predict(asked.work, small).step_s * 1.01


@pytest.mark.parametrize("hbm_gib", [5, 8, 16, 60])
def test_what_is_chosen_beats_streaming_everything_and_keeps_the_budget(hbm_gib: int) -> None:
    asked = with_memory(question(train_batch_size=8), hbm_gib, 60)
    plan = search(asked)
    assert memory_table(asked, plan).overall == "FITS"
    streamed = replace(
        plan,
        round_micro_batches=1,
        weight_slots=2,
        grad_slots=2,
        segments=tuple(
            replace(s, state="ram", activations="recompute", weights="pool", grads="pool") if s.kind == "block" else s
            for s in plan.segments
        ),
    )
    assert cost_s(asked, plan) <= cost_s(asked, streamed)


def test_a_small_step_keeps_its_state_in_hbm_and_a_large_one_its_activations() -> None:
    """The optimizer bounds a step of few tokens, arithmetic one of many."""
    few = search(with_memory(question(train_batch_size=1, micro_batch_tokens=2048), 12, 60))
    many = search(with_memory(question(train_batch_size=64, micro_batch_tokens=8192), 12, 60))
    assert sum(b.state == "hbm" for b in few.blocks) > sum(b.state == "hbm" for b in many.blocks)
    roomy = search(with_memory(question(train_batch_size=64, micro_batch_tokens=8192), 20, 60))
    assert all(b.activations == "keep" for b in roomy.blocks)


@pytest.mark.parametrize("rows", [1, 2, 16, 64])
def test_with_room_for_all_nothing_streams_and_no_more_is_taken_than_makes_it_faster(rows: int) -> None:
    """Traffic that is hidden in simulated time is not free, and rounds cost nothing where nothing travels."""
    asked = with_memory(question(train_batch_size=rows), 140, 60)
    plan = search(asked)
    assert {(s.state, s.weights) for s in plan.segments} == {("hbm", "own")}
    assert {block.activations for block in plan.blocks} == {"keep"}
    assert plan.round_micro_batches == 1
    whole = replace(plan, round_micro_batches=asked.num_micro_batches)
    assert predict(asked.work, whole).step_s == pytest.approx(predict(asked.work, plan).step_s)


def test_there_are_no_more_slots_than_blocks_that_stream() -> None:
    """The bytes of others, which nothing would use, are room for something else."""
    asked = question(spec_of(3, 2048, tied=False, vocab_size=5000), train_batch_size=2)
    found = set()
    for hbm_gib in range(10, 31):
        plan = search(with_memory(asked, hbm_gib / 8, 60))
        pooled = sum(block.weights == "pool" for block in plan.blocks)
        assert plan.weight_slots == (1 if pooled <= 1 else 2)
        assert plan.grad_slots in ((1,) if pooled <= 1 else (2, 3) if pooled > 2 else (2,))
        found.add(pooled)
        validate(plan)
    assert {1, 2} <= found


def test_long_documents_keep_attention_first_and_short_ones_all_of_a_block() -> None:
    """Seconds for a byte: the attention of a token grows with its document, what it gives does not."""
    ways = {}
    for length in (512, 32768):
        asked = question(max_length=length, micro_batch_tokens=32768, train_batch_size=32 * 32768 // length)
        plan = search(with_memory(asked, 11, 200))
        ways[length] = [block.activations for block in plan.blocks]
        assert memory_table(with_memory(asked, 11, 200), plan).overall == "FITS"
    assert "keep_attention" in ways[32768]
    assert "keep_attention" not in ways[512]
    assert "keep" in ways[512]


def test_blocks_that_attend_most_keep_it_first() -> None:
    """Of full attention and windows, at as many bytes, the full ones; of blocks alike, the last."""
    shapes = [AttentionShape(16, 128, None if i % 3 == 0 else 1024) for i in range(10)]
    spec = replace(SMALL, attention=tuple(shapes))
    asked = question(spec, max_length=32768, micro_batch_tokens=32768, train_batch_size=32)
    attention, everything = fillings(asked)
    order = [index - 1 for index, _ in attention]
    assert order[:4] == [9, 6, 3, 0]
    assert order[4:] == sorted(order[4:], reverse=True)
    assert [index for index, _ in everything] == [*range(10, 0, -1)]
    with_recompute = question(spec, activations="recompute")
    assert fillings(with_recompute) == ([], [])


def test_blocks_below_all_that_is_trained_keep_nothing() -> None:
    segments = [
        replace(s, tensors=tuple(replace(t, trainable=i >= 6) for t in s.tensors)) for i, s in enumerate(SMALL.segments)
    ]
    asked = question(replace(SMALL, segments=tuple(segments)), max_length=32768, micro_batch_tokens=32768)
    for filling in fillings(asked):
        assert {index for index, _ in filling} == {6, 7, 8, 9, 10}


def test_the_disk_takes_what_ram_cannot_and_no_more() -> None:
    asked = question(train_batch_size=8, clip_mode="deferred")
    plenty, short = search(with_memory(asked, 6, 60)), search(with_memory(asked, 6, 8.8))
    assert (plenty.disk_slots, sum(s.state == "disk" for s in plenty.segments)) == (0, 0)
    on_disk = [s.state == "disk" for s in short.segments]
    assert any(on_disk)
    table = memory_table(with_memory(asked, 6, 8.8), short)
    assert table.overall == "FITS"
    first = on_disk.index(True)
    back = replace(short, segments=tuple(
        replace(s, state="ram") if i == first else s for i, s in enumerate(short.segments)
    ))  # fmt: skip
    assert memory_table(with_memory(asked, 6, 8.8), back).verdict("ram") != "FITS", "one more would have fitted RAM"


def test_two_passes_are_taken_where_ram_is_short_of_gradients_and_not_where_they_are_refused() -> None:
    """A short step hides no disk behind it: computing twice is cheaper than writing states."""
    asked = question(train_batch_size=2)
    roomy, short = search(with_memory(asked, 6, 60)), search(with_memory(asked, 6, 8.8))
    assert (roomy.clip_mode, short.clip_mode) == ("deferred", "two-pass")
    assert memory_table(with_memory(asked, 6, 8.8), short).overall == "FITS"
    for mode in ("deferred", "two-pass"):
        obeyed = search(with_memory(question(train_batch_size=2, clip_mode=mode), 8, 60))
        assert obeyed.clip_mode == mode


def test_gradients_that_differ_from_run_to_run_are_not_computed_twice() -> None:
    asked = question(train_batch_size=2, deterministic=False)
    assert search(with_memory(asked, 6, 8.8)).clip_mode == "deferred"


def test_a_disk_that_checkpoints_fill_does_not_slow_the_step() -> None:
    """All plans need the same of it. (Where that left little to spare, the plan that needs least of all was taken.)"""
    asked = with_memory(question(train_batch_size=8, save_strategy="steps"), 20, 60)
    plan = search(asked)
    written = memory_table(asked, plan).total_bytes("disk")
    full = replace(asked, machine=replace(asked.machine, disk_free_bytes=int(1.01 * written)))
    assert memory_table(full, plan).verdict("disk") == "TIGHT"
    assert search(full) == plan


def with_frozen(spec: ModelSpec, still: Collection[int]) -> ModelSpec:
    """`spec` with nothing to train in these of its segments."""
    frozen = {
        index: replace(spec.segments[index], tensors=tuple(
            replace(tensor, trainable=False) for tensor in spec.segments[index].tensors
        ))
        for index in still
    }  # fmt: skip
    return replace(spec, segments=tuple(frozen.get(i, segment) for i, segment in enumerate(spec.segments)))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_chosen_is_the_cheapest_of_all_and_no_plan_costs_less_than_its_floor(data: st.DataObject) -> None:
    """On machines where anything may be slow: the floor leaves out no plan that could be the cheapest."""
    layers = data.draw(st.integers(2, 6), "layers")
    spec = spec_of(layers, 2048, tied=data.draw(st.booleans(), "tied"), vocab_size=50_000)
    spec = with_frozen(spec, data.draw(st.just(set()) | st.sets(st.integers(0, layers)), "frozen"))
    rows, length = data.draw(st.sampled_from([2, 3, 8, 24]), "rows"), data.draw(st.sampled_from([1024, 4096]), "length")
    asked = question(spec, train_batch_size=rows, max_length=length, micro_batch_tokens=8192)
    slow = {field: st.sampled_from([0.1, 1.0, 3.0]) for field in ("h2d_Bps", "d2h_Bps", "link_both_Bps", "dram_Bps",
            "update_params_per_s", "disk_read_Bps", "disk_write_Bps", "matmul_flops_per_s")}  # fmt: skip
    slow["hbm_Bps"] = st.sampled_from([0.01, 1.0])
    times = data.draw(st.fixed_dictionaries(slow), "times as fast")
    rates = replace(H200.rates, **{field: getattr(H200.rates, field) * factor for field, factor in times.items()})
    asked = replace(asked, work=replace(asked.work, rates=rates))
    asked = with_memory(asked, data.draw(st.floats(3, 14), "HBM"), data.draw(st.floats(3, 30), "RAM"))
    floor, ways, costs_s = Floor(asked), fillings(asked), []
    for start in placed(asked):
        least_s = floor.least(*lightest(start, ways[0]))
        for plan in (without_idle_slots(asked, plan) for plan in filled(asked, start, *ways)):
            floor_s, found_s = floor(plan), cost_s(asked, plan)
            assert least_s <= floor_s * (1 + 1e-9), plan
            assert floor_s + wear_s(asked, plan) <= found_s * (1 + 1e-9), plan
            costs_s.append(found_s)
    assume(costs_s)
    assert cost_s(asked, search(asked)) == pytest.approx(min(costs_s))


@pytest.mark.parametrize("num_trained", [0, 1, 2, 7])
def test_frozen_blocks_take_no_gradient_slots(num_trained: int) -> None:
    """HBM that no gradient would pass through made a run that fits be refused."""
    trained = range(9 - num_trained, 9)  # of eight blocks, HEAD behind them
    asked = question(with_frozen(spec_of(8, 4096, tied=False), set(range(1, 9)) - {*trained}), train_batch_size=8)
    for hbm_gib in (3.5 if num_trained < 2 else 4, 5.5, 9):
        plan = search(with_memory(asked, hbm_gib, 60))
        used = {place for op in build(plan, "train", 4, True) for place in op.writes if place.pool == "g"}
        shared = {place for place in used if isinstance(place.key, int)}
        assert plan.grad_slots == max(1, len(shared)), plan
        assert memory_table(with_memory(asked, hbm_gib, 60), plan).overall != "NO"


def test_a_gradient_slot_is_held_by_blocks_that_are_trained_alone() -> None:
    """With one slot, and frozen blocks between those that need it: these are computed while it travels. (Were they
    counted, the floor would be a tenth too high.)"""
    asked = question(with_frozen(spec_of(24, 2048), range(2, 25, 2)), train_batch_size=20, round_micro_batches=1)
    rates = replace(H200.rates, h2d_Bps=1e11, d2h_Bps=1e11, link_both_Bps=1e15, dram_Bps=1e15, update_params_per_s=1e13)
    asked = replace(asked, work=replace(asked.work, rates=rates))
    plan = replace(_streamed(asked, 1, "recompute"), grad_slots=1)
    assert Floor(asked)(plan) <= cost_s(asked, plan) * (1 + 1e-9)


def test_in_two_passes_what_travels_in_both_counts_twice() -> None:
    """Weights and waiting inputs, but for what slots hold when the second pass begins."""
    asked = question(spec_of(24, 2048), train_batch_size=8, clip_mode="two-pass")
    plan = _in_passes(_streamed(asked, asked.num_micro_batches, "offload"), "two-pass")
    floor_s = Travel(plan, Parts(asked.work).of(plan)[1], 1, Link.of(asked.work.rates)).passes().link_s
    work_s = predict(asked.work, plan).work_s
    assert 0.9 < floor_s / (work_s[Lane.H2D] + work_s[Lane.D2H]) <= 1


def test_the_clearing_of_the_gradient_of_head_waits_for_nothing() -> None:
    """Where the device's memory is slow it takes long, and is done while HEAD's weights are updated and fetched."""
    asked = question(with_frozen(spec_of(1, 1024, tied=False, vocab_size=50_000), {0}), train_batch_size=2)
    slow = replace(H200.rates, hbm_Bps=0.01 * H200.rates.hbm_Bps, update_params_per_s=4e8)
    asked = replace(asked, work=replace(asked.work, rates=slow))
    plan = _streamed(asked, asked.num_micro_batches, "keep")
    assert Floor(asked)(plan) <= cost_s(asked, plan) * (1 + 1e-9)


def test_the_floor_counts_no_way_home_of_a_gradient_that_is_used_up_on_the_device() -> None:
    """In two passes a block whose state is in HBM shares a gradient slot and still drains nothing: with all blocks but
    one like that, what is drained is that one's."""
    slow_link = replace(H200.rates, d2h_Bps=1e9, link_both_Bps=1e12)
    asked = question(train_batch_size=2, clip_mode="two-pass")
    asked = replace(asked, work=replace(asked.work, rates=slow_link))
    plan = _with_residents(_in_passes(_streamed(asked, 1, "recompute"), "two-pass"), 11)
    drained = [block for block in plan.blocks if block.state != "hbm"]
    assert (len(plan.blocks), len(drained)) == (10, 1)
    assert Floor(asked)(plan) <= cost_s(asked, plan)


def test_what_a_run_needs_at_least_is_enough_and_less_is_not() -> None:
    asked = with_memory(question(train_batch_size=8), 8, 60)
    least = least_bytes(asked, "ram")
    assert least is not None
    assert least_bytes(with_memory(asked, 0.5, 60), "ram") is None


DEEP = spec_of(120, 4096)
WINDOWED = replace(DEEP, attention=tuple(AttentionShape(32, 128, None if i % 6 == 5 else 1024) for i in range(120)))


@pytest.mark.parametrize(
    ("spec", "length", "hbm_gib", "ram_gib", "most_simulated"),
    [
        (DEEP, 8192, 79, 400, 10),
        (DEEP, 8192, 23, 400, 5),
        (DEEP, 8192, 139, 1400, 15),
        (DEEP, 8192, 23, 150, 5),
        (DEEP, 8192, 79, 150, 5),
        (DEEP, 2048, 79, 150, 10),
        (WINDOWED, 8192, 139, 1400, 25),
    ],
    ids=["roomy", "capped", "all in HBM", "capped, disk", "disk", "short rows, disk", "windows"],
)
def test_the_search_is_quick_at_120_layers(
    spec: ModelSpec, length: int, hbm_gib: int, ram_gib: int, most_simulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many of several hundred plans the floor does not leave out; and seconds."""
    simulated = 0

    def counted(work: Workload, plan: Plan) -> Prediction:
        nonlocal simulated
        simulated += 1
        return predict(work, plan)

    monkeypatch.setattr(cheapest, "predict", counted)
    asked = question(spec, max_length=length, micro_batch_tokens=16384, train_batch_size=64 * 8192 // length)

    def searched() -> None:
        nonlocal simulated
        simulated = 0
        search(with_memory(asked, hbm_gib, ram_gib))
        assert 0 < simulated <= most_simulated

    assert quiet_s(searched, limit_s=2.0) < 2.0


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=80), st.floats(0, 0.999), st.booleans())
def test_the_border_is_where_the_room_ends(sizes: list[int], share: float, from_above: bool) -> None:
    taken = [0, *accumulate(sizes)]
    free = share * taken[-1]
    last = max(count for count, bytes_ in enumerate(taken) if bytes_ <= free)
    num = len(sizes)

    def room(count: int) -> list[float]:
        return [free - taken[num - count if from_above else count], 5.0]

    fits, fails = (num, 0) if from_above else (0, num)
    assert border(room, fits, room(fits), fails, room(fails)) == (num - last if from_above else last)

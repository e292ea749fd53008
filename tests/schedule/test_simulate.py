"""The null device: simulated time shows that what should overlap does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.planner.changes import PASSING, changed_at
from megatrain.schedule import (
    DeadlockError,
    Kind,
    Lane,
    Op,
    Plan,
    Program,
    Schedule,
    Sharing,
    Use,
    build,
    parse,
    simulate,
)
from tests.schedule.plans import DISK_STATE, RESIDENT, STREAMED, plan_of, plans, runs_of

EIGHT = plan_of([STREAMED] * 8)


def durations(**seconds: float) -> Callable[[Op], float]:
    """1 s for compute per micro-batch; what is not named takes no time."""
    table = {"FORWARD": 1.0, "BACKWARD": 1.0, "HEAD": 1.0, **seconds}
    return lambda op: table.get(op.kind, 0.0)


@pytest.mark.parametrize("slow", ["L005", "L007", "HEAD"])
@pytest.mark.parametrize("program", ["train", "eval"])
def test_a_slow_update_of_a_late_layer_does_not_delay_an_early_forward(program: Program, slow: str) -> None:
    schedule = build(EIGHT, program, 2, True)
    usual = durations(FETCH=0.1, UPDATE=0.1)
    fast = simulate(schedule, usual)
    late = simulate(schedule, lambda op: 100.0 if (op.kind, op.segment) == (Kind.UPDATE, slow) else usual(op))
    first_use = next(i for i, op in enumerate(schedule) if op.segment == slow and op.lane is Lane.COMPUTE and op.reads)
    early = [i for i, op in enumerate(schedule[:first_use]) if op.kind in (Kind.EMBED, Kind.FORWARD)]
    assert len(early) == {"L005": 2 * 6, "L007": 2 * 8, "HEAD": 2 * 9}[slow]
    assert [late.finish_s[i] for i in early] == [fast.finish_s[i] for i in early]
    assert late.start_s[first_use] > 100.0 > fast.start_s[first_use]


def test_updates_hide_behind_the_forward_of_the_next_step() -> None:
    """2 s of forward a layer against 1.5 s of update: only the first two updates are in the way."""
    done = simulate(build(EIGHT, "train", 2, True), durations(UPDATE=1.5))
    assert done.busy_s[Lane.HOST] == 10 * 1.5
    assert done.makespan_s == done.busy_s[Lane.COMPUTE] + 2 * 1.5


def test_updates_that_pass_through_the_device_let_the_host_keep_up() -> None:
    """3 s of update a layer are too long for 2 s of forward; with every other one on the device the host has enough."""
    usual = durations(FETCH=0.2, DRAIN=0.2, FETCH_STATE=1.0, FETCH_GRAD=0.4, STORE=0.2, STORE_STATE=1.0)

    def seconds(op: Op) -> float:
        return usual(op) if op.kind is not Kind.UPDATE else 3.0 if op.lane is Lane.HOST else 0.1

    passing = changed_at(replace(EIGHT, state_slots=2), range(2, 9, 2), PASSING)
    host, device = (simulate(build(plan, "train", 2, True), seconds) for plan in (EIGHT, passing))
    assert host.makespan_s - host.busy_s[Lane.COMPUTE] > 10 * 3.0 - 8 * 2.0
    assert device.busy_s[Lane.HOST] == 6 * 3.0
    first_s, last_s = 2 * 3.0 + 0.2, 0.4  # two updates and a FETCH before the first layer, the last drains
    assert device.makespan_s - device.busy_s[Lane.COMPUTE] < first_s + last_s + 1.0


def test_streaming_hides_behind_compute_in_one_round() -> None:
    """2 s a visit against 1.9 s a fetch and 1.9 s a drain: compute waits for the first weights only."""
    done = simulate(build(EIGHT, "train", 2, False), durations(FETCH=1.9, DRAIN=1.9))
    last_drains_s = 2 * 1.9  # of L000, and of EMBED
    idle_s = done.makespan_s - done.busy_s[Lane.COMPUTE]
    assert idle_s <= 2 * 1.9 + last_drains_s + 1e-9


def test_gradient_sums_come_back_in_time_in_later_rounds() -> None:
    plan = plan_of([STREAMED] * 8, slots=3, grad_slots=3, round_micro_batches=4)
    done = simulate(build(plan, "train", 8, False), durations(FETCH=0.9, DRAIN=1.8, FETCH_GRAD=1.8))
    idle_s = done.makespan_s - done.busy_s[Lane.COMPUTE]
    assert idle_s <= 2 * 0.9 + 2 * 1.8 + 1e-9


def test_resident_layers_never_wait() -> None:
    plan = plan_of([RESIDENT] * 4, embed=RESIDENT, head=RESIDENT)
    schedule = build(plan, "train", 2, True)
    assert {op.lane for op in schedule} == {Lane.COMPUTE, Lane.HOST}
    assert simulate(schedule, durations(UPDATE=0.5)).makespan_s == 6 * 0.5 + 2 * (4 + 1 + 4)


@given(plans(), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_simulation_is_a_timetable(plan: Plan, num: int, random: object) -> None:
    schedule = runs_of(plan, ["train", "train"], num)[1].schedule
    seconds = {id(op): random.choice([0.0, 1.0, 7.0]) for op in schedule}
    done = simulate(schedule, lambda op: seconds[id(op)])
    finish = {op.records: done.finish_s[i] for i, op in enumerate(schedule)}
    free: dict[Lane, float] = {}
    for index, op in enumerate(schedule):
        ready_s = max([free.get(op.lane, 0.0), *(finish[token] for token in op.waits)])
        assert done.start_s[index] == ready_s
        assert done.finish_s[index] == ready_s + seconds[id(op)]
        free[op.lane] = done.finish_s[index]
    assert done.makespan_s == max(done.finish_s)
    assert sum(done.busy_s.values()) == sum(seconds.values())
    path = done.critical_path
    assert done.start_s[path[0]] == 0.0
    assert done.finish_s[path[-1]] == done.makespan_s
    assert sum(seconds[id(schedule[i])] for i in path) == done.makespan_s


def test_a_deadlock_names_every_lane() -> None:
    text = "FETCH L000 @h2d wait:b1 -> f0\nFORWARD L000 m0 @compute wait:f0 -> b1\n"
    with pytest.raises(DeadlockError) as error:
        simulate(parse(text), durations())
    assert "h2d: op 0 (FETCH L000) waits for b1" in str(error.value)
    assert "compute: op 1 (FORWARD L000) waits for f0" in str(error.value)
    one_lane = tuple(replace(op, waits=()) for op in parse(text))
    assert simulate(one_lane, durations()).makespan_s == 1.0
    assert simulate((), durations()).makespan_s == 0.0


def two_lanes(second: str) -> Schedule:
    return parse(f"UPDATE L000 @host w:ram.w.L000\n{second}")


SECOND = "FETCH L001 @h2d r:ram.w.L001 w:w.0"


def shared(yields: bool, rates: dict[str, float], capacity: float = 100.0) -> Sharing:
    return Sharing(lambda op: (Use("dram", rates[op.kind], yields=yields and op.kind == "UPDATE"),), {"dram": capacity})


def test_what_ops_ask_for_is_theirs_while_there_is_enough() -> None:
    done = simulate(two_lanes(SECOND), durations(UPDATE=4.0, FETCH=2.0), shared(True, {"UPDATE": 60, "FETCH": 40}))
    assert done.finish_s == (4.0, 2.0)


def test_ops_share_what_is_short_and_go_on_at_full_speed_afterwards() -> None:
    """Both ask for 100 of 100: half speed until the shorter one is done."""
    done = simulate(two_lanes(SECOND), durations(UPDATE=4.0, FETCH=2.0), shared(False, {"UPDATE": 100, "FETCH": 100}))
    assert done.finish_s == pytest.approx((6.0, 4.0))
    assert done.busy_s[Lane.HOST] == pytest.approx(6.0)


def test_a_use_that_yields_gets_what_the_others_leave() -> None:
    """The copy runs as if alone; the update has 40 of the 80 it asks for, half speed, for 2 s."""
    done = simulate(two_lanes(SECOND), durations(UPDATE=4.0, FETCH=2.0), shared(True, {"UPDATE": 80, "FETCH": 60}))
    assert done.finish_s == pytest.approx((5.0, 2.0))


def test_a_use_that_yields_is_never_starved() -> None:
    done = simulate(two_lanes(SECOND), durations(UPDATE=1.0, FETCH=2.0), shared(True, {"UPDATE": 100, "FETCH": 100}))
    assert done.finish_s == pytest.approx((2.8, 2.0)), "a tenth of the memory for 2 s"


def test_the_shortest_of_what_an_op_needs_sets_its_speed() -> None:
    """The copy has all the memory it wants and a quarter of the link."""
    uses = {"UPDATE": (), "FETCH": (Use("dram", 10.0), Use("link", 40.0))}
    sharing = Sharing(lambda op: uses[op.kind], {"dram": 100.0, "link": 10.0})
    assert simulate(two_lanes(SECOND), durations(UPDATE=4.0, FETCH=2.0), sharing).finish_s == pytest.approx((4.0, 8.0))


@pytest.mark.parametrize(
    ("on_disk", "disk_slots", "step_s"),
    [((0, 5), 1, 32.0), ((1, 4), 1, 34.0), ((0, 3, 5), 2, 37.0), ((1, 3, 4), 2, 39.0)],
)
def test_two_passes_hide_the_disk_best_behind_one_slot_and_states_far_apart(
    on_disk: tuple[int, ...], disk_slots: int, step_s: float
) -> None:
    """32 s of compute, 10 of them between the first block's update and the last one's; a disk of 5 s a state and way.

    Between two updates of a slot a state must be written and one be read. All four plans hold one state on the disk
    while another is in RAM: what a second slot adds is a state, to be read and written as well."""
    blocks = [{**STREAMED, **(DISK_STATE if block in on_disk else {})} for block in range(6)]
    schedule = build(plan_of(blocks, two_pass=True, disk_slots=disk_slots), "train", 1, True)
    one_device = Sharing(
        lambda op: (Use("disk", 1.0),) if op.lane in (Lane.DISK, Lane.DISK_READ) else (), {"disk": 1.0}
    )
    done = simulate(schedule, durations(BACKWARD=2.0, LOAD_STATE=5.0, SPILL=5.0), one_device)
    assert (done.busy_s[Lane.COMPUTE], done.makespan_s) == (32.0, pytest.approx(step_s))


@settings(deadline=None)
@given(plans(), st.integers(1, 3), st.floats(20, 400))
def test_sharing_never_makes_a_step_shorter(plan: Plan, num_micro_batches: int, capacity: float) -> None:
    schedule = runs_of(plan, ["train", "train"], num_micro_batches)[-1].schedule
    alone = simulate(schedule, durations(UPDATE=2.0, FETCH=0.5, DRAIN=0.7))
    sharing = Sharing(lambda op: (Use("dram", 60.0, yields=op.kind == "UPDATE"),), {"dram": capacity})
    together = simulate(schedule, durations(UPDATE=2.0, FETCH=0.5, DRAIN=0.7), sharing)
    assert together.makespan_s >= alone.makespan_s - 1e-9
    if capacity >= 60.0 * len(Lane):
        assert together.finish_s == alone.finish_s

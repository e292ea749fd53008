"""Plans and sequences of programs for the tests of the schedule, hand-made and random."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from megatrain.schedule import Plan, Program, Run, SegmentPlan, build

STREAMED = {"weights": "pool", "grads": "pool", "state": "ram"}
RESIDENT = {"weights": "own", "grads": "own", "state": "hbm"}
RESIDENT_POOLED = {**RESIDENT, "grads": "pool"}  # in two passes
OWN_RAM = {"weights": "own", "grads": "own", "state": "ram"}
DEVICE = {**STREAMED, "update": "device"}
OWN_DEVICE = {**OWN_RAM, "update": "device"}
DISK_STATE = {"state": "disk"}  # beside weights and grads
DISK_WEIGHTS = {"weights_home": "disk"}
DISK = {**DISK_STATE, **DISK_WEIGHTS}


def plan_of(
    blocks: Sequence[dict] = (STREAMED,) * 4,
    *,
    embed: dict = OWN_RAM,
    head: dict = OWN_RAM,
    tied: bool = False,
    frozen: Sequence[str] = (),
    keep: Sequence[str] = (),
    keep_attention: Sequence[str] = (),
    offload: Sequence[str] = (),
    slots: int = 2,
    grad_slots: int = 2,
    round_micro_batches: int = 99,
    disk_slots: int = 2,
    act_slots: int = 2,
    two_pass: bool = False,
    state_slots: int = 2,
) -> Plan:
    """A plan from the homes of its segments. A frozen one has no state to keep on disk."""
    placed = [("EMBED", "embed", embed)]
    placed += [(f"L{i:03d}", "block", home) for i, home in enumerate(blocks)]
    placed += [("HEAD", "head", head)]
    ways = {"keep": keep, "keep_attention": keep_attention, "offload": offload}
    segments = tuple(
        SegmentPlan(
            name,
            kind,
            name not in frozen,
            **({**home, "state": "ram"} if name in frozen and home["state"] == "disk" else home),
            activations=next((way for way, names in ways.items() if name in names), "recompute"),
        )
        for name, kind, home in placed
    )
    return Plan(segments, tied, slots, grad_slots, round_micro_batches, disk_slots=disk_slots, act_slots=act_slots,
        clip_mode="two-pass" if two_pass else "deferred", grad_landing_slots=grad_slots if two_pass else 0,
        state_slots=state_slots,
    )  # fmt: skip


def runs_of(plan: Plan, programs: Sequence[Program], num_micro_batches: int = 2) -> list[Run]:
    """Build the programs one after the other, as the engine would: every program applies what is pending."""
    runs, pending = [], False
    for program in programs:
        num = 0 if program in ("save", "flush") else num_micro_batches
        runs.append(Run(program, build(plan, program, num, pending), num))
        pending = program == "train"
    return runs


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any valid plan of up to five blocks with at least one trainable segment."""
    num_blocks = draw(st.integers(1, 5))
    homes = [{"weights": w, "grads": g, "state": "ram"} for w in ("pool", "own") for g in ("pool", "own")]
    homes += [{**home, **disk} for home in homes for disk in (DISK_STATE, DISK_WEIGHTS, DISK)]
    two_pass = draw(st.booleans()) and draw(st.booleans())
    passing = [DEVICE, OWN_DEVICE, {**OWN_DEVICE, "weights": "pool"}]
    homes += [RESIDENT, RESIDENT_POOLED] if two_pass else [RESIDENT, *passing]
    blocks = draw(st.lists(st.sampled_from(homes), min_size=num_blocks, max_size=num_blocks))
    ends = [
        OWN_RAM,
        RESIDENT,
        RESIDENT if two_pass else OWN_DEVICE,
        *({**OWN_RAM, **disk} for disk in (DISK_STATE, DISK_WEIGHTS, DISK)),
    ]
    names = ["EMBED", *(f"L{i:03d}" for i in range(num_blocks)), "HEAD"]
    frozen = draw(st.sets(st.sampled_from(names), max_size=len(names) - 1)) if draw(st.booleans()) else set()
    return plan_of(
        blocks,
        embed=draw(st.sampled_from(ends)),
        head=draw(st.sampled_from(ends)),
        tied=draw(st.booleans()),
        frozen=sorted(frozen),
        keep=sorted(draw(st.sets(st.sampled_from(names[1:-1])))),
        keep_attention=sorted(draw(st.sets(st.sampled_from(names[1:-1])))),
        offload=sorted(draw(st.sets(st.sampled_from(names[1:-1])))),
        slots=draw(st.integers(2, min(4, num_blocks + 2))),
        grad_slots=draw(st.integers(1, 3)),
        round_micro_batches=99 if two_pass else draw(st.integers(1, 5)),
        two_pass=two_pass,
        disk_slots=draw(st.integers(1, 3)),
        act_slots=draw(st.integers(2, 3)),
        state_slots=draw(st.integers(1, 3)),
    )


def sequences() -> st.SearchStrategy[list[Program]]:
    return st.lists(st.sampled_from(["train", "train", "eval", "save", "flush"]), min_size=1, max_size=5)

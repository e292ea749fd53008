"""Plans that no schedule can follow are refused with the segment, the value and the remedy."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from megatrain.errors import PlanError
from megatrain.schedule import Plan, SegmentPlan, validate
from tests.schedule.plans import DEVICE, DISK_STATE, DISK_WEIGHTS, OWN_DEVICE, OWN_RAM, RESIDENT, STREAMED, plan_of


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        (plan_of(embed=STREAMED), "EMBED has weights 'pool'; embed segments need weights 'own'"),
        (plan_of(head={**OWN_RAM, "grads": "pool"}), "HEAD has grads 'pool'; head segments need grads 'own'"),
        (plan_of([{**RESIDENT, "weights": "pool"}]), "L000 has weights 'pool'; segments with state 'hbm'"),
        (plan_of([{**RESIDENT, "grads": "pool"}]), "L000 has grads 'pool'; segments with state 'hbm'"),
        (plan_of([DEVICE], state_slots=0), "state_slots is 0, but some segments have update 'device'; use at least 1"),
        (plan_of([STREAMED] * 2, state_slots=5), "state_slots is 5; use 0 to 4, one a segment"),
        (plan_of([DEVICE, STREAMED], two_pass=True), "L000 has update 'device', which two passes do not know"),
        (plan_of([{**DEVICE, "state": "hbm"}]), "L000 has state 'hbm' and update 'device'"),
        (plan_of([{**STREAMED, **DISK_STATE}], disk_slots=0), "disk_slots is 0, but some segments live on disk"),
        (plan_of([{**STREAMED, **DISK_WEIGHTS}], frozen=["L000"], disk_slots=0), "disk_slots is 0"),
        (plan_of([{**DEVICE, **DISK_STATE}]), "L000 lives on disk and has update 'device'"),
        (plan_of([{**DEVICE, **DISK_WEIGHTS}]), "L000 lives on disk and has update 'device'"),
        (plan_of(keep_attention=["HEAD"]), "HEAD has activations 'keep_attention'; only blocks attend"),
        (plan_of(keep=["EMBED"]), "EMBED has activations 'keep'; only blocks attend, keep"),
        (plan_of(offload=["HEAD"]), "HEAD has activations 'offload'; only blocks attend, keep"),
        (plan_of([{**RESIDENT, **DISK_WEIGHTS}]), "L000 has state 'hbm' and weights_home 'disk'"),
        (plan_of(slots=1), "weight_slots is 1, but 4 segments share"),
        (plan_of([STREAMED], slots=0), "weight_slots is 0, but 1 segments share"),
        (plan_of(grad_slots=0), "grad_slots is 0"),
        (plan_of(round_micro_batches=0), "round_micro_batches is 0"),
        (plan_of([]), "plan has segments ['EMBED', 'HEAD']"),
        (Plan((), False, 2, 2, 1), "plan has segments []"),
    ],
)
def test_refused(plan: Plan, complaint: str) -> None:
    with pytest.raises(PlanError) as error:
        validate(plan)
    assert complaint in str(error.value)


def test_a_frozen_segment_has_no_state_to_keep_on_disk() -> None:
    plan = plan_of([STREAMED])
    frozen = replace(plan.segments[1], trainable=False, state="disk")
    with pytest.raises(PlanError, match="L000 is frozen and has no state to keep on disk; use weights_home 'disk'"):
        validate(replace(plan, segments=(plan.segments[0], frozen, plan.segments[2]), disk_slots=1))


def test_names_and_kinds_are_those_of_the_travel_order() -> None:
    plan = plan_of()
    swapped = (*plan.segments[:1], plan.segments[2], plan.segments[1], *plan.segments[3:])
    with pytest.raises(PlanError, match="in travel order"):
        validate(replace(plan, segments=swapped))
    wrong_kind = (SegmentPlan("EMBED", "head", True, "own", "own"), *plan.segments[1:])
    with pytest.raises(PlanError, match="EMBED is planned as kind 'head'; it must be 'embed'"):
        validate(replace(plan, segments=wrong_kind))


@pytest.mark.parametrize("key", ["weight_slots", "grad_slots", "disk_slots", "act_slots", "grad_landing_slots"])
def test_slots_that_nothing_uses_are_no_less_than_none_and_no_more_than_segments(key: str) -> None:
    plan = plan_of([RESIDENT])
    for slots in (-1, 4, 10_000_000):
        with pytest.raises(PlanError, match=f"{key} is {slots}; use 0 to 3"):
            validate(replace(plan, **{key: slots}))
    validate(replace(plan, **{key: 3}))


def test_accepted() -> None:
    validate(plan_of([STREAMED], slots=1))
    validate(plan_of([RESIDENT] * 2, slots=0, grad_slots=0))
    validate(plan_of([OWN_DEVICE] * 2, embed=OWN_DEVICE, head=OWN_DEVICE, slots=0, grad_slots=0, state_slots=1))
    validate(plan_of([DEVICE], state_slots=1))
    validate(plan_of([{**RESIDENT, "grads": "pool"}], frozen=["L000"], slots=0, grad_slots=0))


def test_a_segment_that_comes_from_another_process_has_no_hash_of_it() -> None:
    """Names hash to other numbers there, so it would be missing from every table."""
    segment = SegmentPlan("L000", "block", True, state="disk")
    assert hash(segment) == hash(replace(segment)) != hash(replace(segment, state="ram"))
    again = pickle.loads(pickle.dumps(segment))
    assert again == segment
    assert "_hash" not in vars(again)

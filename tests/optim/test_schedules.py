"""Our multipliers against the learning rates transformers gives, step by step."""

from __future__ import annotations

import pytest
import torch
from transformers import get_scheduler

from megatrain.optim import LearningRateSchedule, count_warmup_steps, multiplier

NUM_STEPS = 40
CASES = {
    "constant": (LearningRateSchedule("constant", NUM_STEPS), "constant", {}),
    "constant, warm-up": (LearningRateSchedule("constant", NUM_STEPS, 7), "constant_with_warmup", {}),
    "linear": (LearningRateSchedule("linear", NUM_STEPS, 7), "linear", {}),
    "linear, no warm-up": (LearningRateSchedule("linear", NUM_STEPS), "linear", {}),
    "linear, warm-up only": (LearningRateSchedule("linear", NUM_STEPS, NUM_STEPS), "linear", {}),
    "cosine": (LearningRateSchedule("cosine", NUM_STEPS, 7), "cosine", {}),
    "cosine, floor": (
        LearningRateSchedule("cosine_with_min_lr", NUM_STEPS, 7, min_ratio=0.1),
        "cosine_with_min_lr",
        {"min_lr_rate": 0.1},
    ),
    **{
        f"stable, {shape}": (
            LearningRateSchedule(
                "warmup_stable_decay", NUM_STEPS, 7, decay_steps=11, decay_shape=shape, min_ratio=floor
            ),
            "warmup_stable_decay",
            {"num_decay_steps": 11, "decay_type": shape, "min_lr_ratio": floor},
        )
        for shape, floor in (("linear", 0.0), ("cosine", 0.2), ("1-sqrt", 0.05))
    },
}


@pytest.mark.parametrize("case", CASES)
def test_as_transformers(case):
    ours, name, extra = CASES[case]
    peak = 3e-4
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    theirs = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=ours.warmup_steps,
        num_training_steps=NUM_STEPS,
        scheduler_specific_kwargs=extra,
    )
    for step in range(NUM_STEPS + 5):
        assert peak * multiplier(ours, step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-14, abs=1e-20), step
        optimizer.step()
        theirs.step()


def test_warmup_steps_or_ratio():
    assert count_warmup_steps(100, 0, 0.031) == 4
    assert count_warmup_steps(100, 5, 0.0) == 5
    assert count_warmup_steps(100, 0, 0.0) == 0
    with pytest.raises(ValueError, match="exclude each other"):
        count_warmup_steps(100, 5, 0.1)
    with pytest.raises(ValueError, match="warmup_ratio is 3"):
        count_warmup_steps(100, 0, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "cosin"}, "unknown schedule 'cosin'"),
        ({"decay_shape": "exp"}, "unknown decay shape 'exp'"),
        ({"warmup_steps": -1}, "must not be negative"),
        ({"min_ratio": 1.5}, "min_ratio is 1.5"),
        ({"kind": "warmup_stable_decay", "warmup_steps": 6, "decay_steps": 5}, "do not fit into 10 steps"),
    ],
)
def test_bad_schedules_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LearningRateSchedule(**{"kind": "cosine", "num_steps": 10, **fields})


def test_a_negative_step_is_refused():
    with pytest.raises(ValueError, match="step is -1"):
        multiplier(LearningRateSchedule("constant", 10), -1)

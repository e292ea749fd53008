"""Dropout and router noise: the engine throws the dice of the reference, in recomputation and in rounds too."""

from __future__ import annotations

import pytest
import torch

from megatrain.errors import ModelError
from megatrain.models.dice import key_of, thrown
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from megatrain.optim import AdamW
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes
from tests.families import mostly_slow, tiny_batch, tiny_buffers, tiny_config, tiny_masters

TOKENS = 24
HYPERS = [AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1) for _ in range(2)]
STEPS = [[tiny_batch(cut, seed=10 * step + i) for i, cut in enumerate([(11, 13), (24,)])] for step in range(2)]
DROPPING = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.2},
    "gpt_bigcode": {"resid_pdrop": 0.1, "embd_pdrop": 0.2},
    "gpt_neox": {"hidden_dropout": 0.1},
    "opt": {"dropout": 0.1},
    "phi": {"resid_pdrop": 0.1, "embd_pdrop": 0.2},
    "phi3": {"resid_pdrop": 0.1},
    "persimmon": {"hidden_dropout": 0.1},
    "seed_oss": {"residual_dropout": 0.1},
    "stablelm": {"hidden_dropout": 0.1},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.2},
    "mixtral": {"router_jitter_noise": 0.1},
    "minimax": {"router_jitter_noise": 0.1},
    "minimax_m2": {"router_jitter_noise": 0.1},
}
ROUNDS = Placement(round_micro_batches=1, weight_slots=3, keep=True)


def trained(
    case: str, precision: str = "fp32", placement: Placement | None = None, seed: int = 0, **changes: float
) -> tuple[list[float], dict]:
    config = tiny_config(case, **DROPPING[case] | changes)
    run = Streamed(
        config, tiny_masters(model_spec(config)), TOKENS, precision=precision, placement=placement or Placement(),
        neftune=(None, seed),
    )  # fmt: skip
    try:
        for name, value in tiny_buffers(run.template).items():
            run.template.saved_buffers[name].copy_(value)
        losses = [result.loss for result in run.train(STEPS, HYPERS)]
        return losses, run.state()
    finally:
        run.close()


def wanted(case: str, precision: str, seed: int = 0) -> reference.Result:
    config = tiny_config(case, **DROPPING[case])
    return reference.train(
        config, tiny_masters(model_spec(config)), STEPS, HYPERS, precision=precision, max_grad_norm=1.0,
        chunk_tokens=CHUNK_TOKENS, dice_seed=seed,
        buffers=tiny_buffers(ModelTemplate(config, torch.device("cpu"), torch.float32)),
    )  # fmt: skip


@pytest.mark.parametrize("case", mostly_slow([*DROPPING], "gpt2", "opt", "starcoder2", "gpt_neox", "mixtral"))
def test_two_steps_with_dropout_are_the_references(case: str) -> None:
    want = wanted(case, "fp32")
    losses, state = trained(case)
    other = same_bytes(state, want.state)
    assert losses == want.losses, f"{case}: losses; then differ {other[:4]}"
    assert other == [], case
    assert losses != trained(case, **dict.fromkeys(DROPPING[case], 0.0))[0], "the dice must be alive"


@pytest.mark.parametrize("case", ["gpt2", "mixtral"])
@pytest.mark.parametrize(
    "placement", [Placement(), ROUNDS, Placement(offload=True)], ids=["recompute", "keep-rounds", "offload"]
)
def test_no_placement_changes_a_bit_of_dropout(case: str, placement: Placement) -> None:
    losses, state = trained(case, "bf16", placement, seed=3)
    want = wanted(case, "bf16", seed=3)
    other = same_bytes(state, want.state)
    assert losses == want.losses, f"{case}: losses; then differ {other[:4]}"
    assert other == [], case


def test_another_seed_gives_other_masks() -> None:
    assert trained("gpt2", seed=1)[0] != trained("gpt2", seed=2)[0]


def test_every_step_micro_batch_and_layer_has_dice_of_its_own() -> None:
    keys = {key_of(key_of(seed, step, m), n) for seed in (0, 1) for step in (1, 2) for m in (0, 1) for n in (0, 1)}
    assert len(keys) == 16
    batch = tiny_batch([8])
    template = ModelTemplate(tiny_config("gpt2", resid_pdrop=0.1), torch.device("cpu"), torch.float32)
    weights = {
        t.local: torch.from_numpy(tiny_masters(template.spec)[t.name]) for t in template.spec.segments[0].tensors
    }
    dice = [call.dice for call in template.embed(weights, batch, key=5)[1]]
    assert len({*dice, key_of(5, 0)}) == len(dice) + 1
    assert all(call.dice is None for call in template.embed(weights, batch)[1])


def test_evaluation_rolls_no_dice() -> None:
    sums = []
    for changes in (DROPPING["gpt2"], {}):
        config = tiny_config("gpt2", **changes)
        run = Streamed(config, tiny_masters(model_spec(config)), TOKENS, precision="fp32")
        run.engine.train_step(STEPS[0], 1, AdamW(0.0, 0.9, 0.95, 1e-8, 0.0))  # leaves the layers in training mode
        sums.append(run.engine.evaluate(STEPS[0]))
        run.close()
    assert sums[0] == sums[1]


def test_the_default_generator_is_left_as_it_was() -> None:
    before = torch.get_rng_state()
    with thrown(7, torch.device("cpu")):
        drawn = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with thrown(7, torch.device("cpu")):
        assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(
    ("case", "changes", "what"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1, but the attention operator has no dropout"),
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop 0.1, but the attention operator has no dropout"),
        ("opt", {"layerdrop": 0.1}, "layerdrop 0.1, which skips whole layers"),
    ],
)
def test_dice_that_cannot_be_thrown_again_are_refused(case: str, changes: dict[str, float], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        model_spec(tiny_config(case, **changes))

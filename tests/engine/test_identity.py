"""The engine equals the plain reference loop, and itself under every placement, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatrain.engine.chaos import Chaos
from megatrain.engine.trace import Trace
from megatrain.errors import PlanError
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from megatrain.schedule import Kind, build
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, make_plan, same_bytes
from tests.families import FAMILIES, tiny_batch, tiny_config, tiny_masters

TOKENS = 40
HYPERS = [AdamW(1e-2 / (k + 1), 0.9, 0.95, 1e-8, 0.1) for k in range(3)]
TWO_SLOTS = Placement()
ALL = frozenset({"EMBED", "L000", "L001", "L002", "L003", "HEAD"})
PLACEMENTS = {
    "two slots": TWO_SLOTS,
    "four slots, one gradient slot": Placement(weight_slots=4, grad_slots=1),
    "three rounds": Placement(round_micro_batches=2),
    "a round a micro-batch": Placement(round_micro_batches=1, weight_slots=3),
    "inputs offloaded": Placement(offload=True),
    "inputs offloaded, rounds": Placement(offload=True, weight_slots=3, round_micro_batches=2),
    "two passes": Placement(two_pass=True),
    "two passes, some at home": Placement(two_pass=True, resident=frozenset({"EMBED", "L001"}), offload=True),
    "two passes, kept, own slots": Placement(
        two_pass=True, keep=True, resident=frozenset({"L000", "L001"}), own=frozenset({"L001", "L002"}), grad_slots=1
    ),
    "kept activations": Placement(keep=True),
    "kept activations, rounds": Placement(keep=True, round_micro_batches=3),
    "kept attention": Placement(keep_attention=True),
    "kept attention, rounds": Placement(keep_attention=True, weight_slots=3, round_micro_batches=2),
    "kept attention, two passes, some at home": Placement(
        keep_attention=True, two_pass=True, resident=frozenset({"L001", "HEAD"})
    ),
    "embedding at home": Placement(resident=frozenset({"EMBED", "L000"})),
    "everything at home": Placement(resident=frozenset({"EMBED", "L000", "L001", "L002", "HEAD"})),
    "state streamed: embedding": Placement(streamed=frozenset({"EMBED"})),
    "state streamed: all but one, rounds": Placement(
        streamed=frozenset({"EMBED", "L000", "L002", "HEAD"}), round_micro_batches=2, keep=True
    ),
    "state streamed: head and front, others at home": Placement(
        streamed=frozenset({"L000", "HEAD"}), resident=frozenset({"EMBED"}), round_micro_batches=1
    ),
    "own slots": Placement(own=frozenset({"L001"}), round_micro_batches=2),
    "two threads": Placement(threads=2),
}

DISK = {
    "all on disk": Placement(state_on_disk=ALL, weights_on_disk=ALL),
    "all on disk, one landing slot, rounds": Placement(
        state_on_disk=ALL, weights_on_disk=ALL, disk_slots=1, round_micro_batches=2, keep=True
    ),
    "here and there on disk": Placement(
        state_on_disk=frozenset({"L000", "L002", "HEAD"}),
        weights_on_disk=frozenset({"EMBED", "L000", "L001"}),
        resident=frozenset({"L003"}),
        disk_slots=3,
    ),
    "two passes, all on disk": Placement(two_pass=True, state_on_disk=ALL, disk_slots=2),
    "two passes, here and there on disk": Placement(
        two_pass=True,
        state_on_disk=frozenset({"EMBED", "L000", "L001", "L003"}),
        weights_on_disk=frozenset({"L000", "L002", "HEAD"}),
        disk_slots=1,
        offload=True,
    ),
    "on disk behind state streamed": Placement(
        state_on_disk=frozenset({"L001", "L002"}), streamed=frozenset({"EMBED", "L000"}), weight_slots=3
    ),
}
PLACEMENTS |= DISK
STREAMED_STATE = [name for name in PLACEMENTS if name.startswith("state streamed")]


def batches(seed: int = 0):
    """3 steps of 5 micro-batches of 40 tokens, documents of uneven lengths."""
    lengths = [(17, 23), (40,), (9, 9, 22), (1, 39), (30, 10)]
    return [[tiny_batch(cut, seed=seed + 10 * step + i) for i, cut in enumerate(lengths)] for step in range(3)]


def streamed(family: str, precision: str, placement: Placement = TWO_SLOTS, chaos: Chaos | None = None):
    config = tiny_config(family)
    masters = tiny_masters(model_spec(config))
    run = Streamed(config, masters, TOKENS, precision=precision, placement=placement, chaos=chaos)
    try:
        return run.train(batches(), HYPERS), run.state()
    finally:
        run.close()


@pytest.fixture(scope="module")
def plain():
    """(family, precision) -> the reference's result, computed once."""
    known = {}

    def get(family: str, precision: str) -> reference.Result:
        if (family, precision) not in known:
            config = tiny_config(family)
            known[family, precision] = reference.train(
                config, tiny_masters(model_spec(config)), batches(), HYPERS, precision=precision, max_grad_norm=1.0,
                chunk_tokens=CHUNK_TOKENS, attn_implementation="megatrain",
            )  # fmt: skip
        return known[family, precision]

    return get


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_equals_the_reference(family, precision, plain):
    want = plain(family, precision)
    results, state = streamed(family, precision)
    assert [r.loss for r in results] == want.losses
    assert [r.grad_norm for r in results] == want.grad_norms
    assert all(norm > 1.0 for norm in want.grad_norms), "clipping must be at work, or this proves less"
    assert same_bytes(state, want.state) == []


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["smollm2", "gemma3", "qwen2"])
def test_no_placement_changes_a_bit(family, placement, plain):
    _, state = streamed(family, "fp32", _fitting(family, PLACEMENTS[placement]))
    assert same_bytes(state, plain(family, "fp32").state) == []


@pytest.mark.parametrize("placement", ["three rounds", "everything at home", *STREAMED_STATE, *DISK])
def test_no_placement_changes_a_bit_in_bf16(placement, plain):
    _, state = streamed("smollm2", "bf16", _fitting("smollm2", PLACEMENTS[placement]))
    assert same_bytes(state, plain("smollm2", "bf16").state) == []


@pytest.mark.parametrize("placement", [name for name, placement in PLACEMENTS.items() if placement.offload])
def test_offloaded_inputs_do_travel(placement):
    """A model as deep as there are slots would offload nothing, and the tests above prove nothing."""
    spec = model_spec(tiny_config("gemma3"))
    plan = make_plan(spec, _fitting("gemma3", PLACEMENTS[placement]))
    kinds = {op.kind for op in build(plan, "train", 5, False)}
    assert {Kind.OFFLOAD, Kind.RELOAD} <= kinds


def _fitting(family: str, placement: Placement) -> Placement:
    names = {segment.name for segment in model_spec(tiny_config(family)).segments}
    fields = ("resident", "streamed", "own", "state_on_disk", "weights_on_disk")
    fitting = {field: getattr(placement, field) & names for field in fields}
    return replace(placement, **fitting)


@pytest.mark.parametrize("seed", range(12))
def test_chaos_changes_no_bit(seed, plain):
    placements = [TWO_SLOTS, Placement(round_micro_batches=2, offload=True), Placement(keep=True, weight_slots=3)]
    placements += [Placement(two_pass=True, offload=True), Placement(two_pass=True, keep=True, resident=ALL)]
    placements.append(Placement(keep_attention=True, round_micro_batches=2))
    placements += [_fitting("gemma3", PLACEMENTS[name]) for name in (*STREAMED_STATE, *DISK)]
    placement = placements[seed % len(placements)]
    _, state = streamed("gemma3", "fp32", placement, Chaos(seed, max_delay_s=0.001))
    assert same_bytes(state, plain("gemma3", "fp32").state) == []


@pytest.mark.parametrize(
    "placement", ["two slots", "two passes, all on disk", STREAMED_STATE[1], "here and there on disk"]
)
def test_evaluation_between_steps_changes_nothing_and_sees_the_update(placement):
    config = tiny_config("qwen3")
    masters = tiny_masters(model_spec(config))
    fitting = _fitting("qwen3", PLACEMENTS[placement])
    runs = [Streamed(config, masters, TOKENS, precision="fp32", placement=p) for p in (fitting, TWO_SLOTS)]
    steps = batches()
    losses = []
    for micro_batches, hyper in zip(steps, HYPERS, strict=True):
        runs[0].train([micro_batches], [hyper])
        losses.append(runs[0].engine.evaluate(steps[0]))
    runs[1].train(steps, HYPERS)
    assert same_bytes(runs[0].state(), runs[1].state()) == []
    assert losses[0] != losses[1]
    for run in runs:
        run.close()


def test_an_evaluation_of_nothing_applies_what_is_pending():
    config = tiny_config("llama")
    run = Streamed(config, tiny_masters(model_spec(config)), TOKENS, precision="fp32")
    run.train(batches()[:1], HYPERS[:1])
    assert run.engine.evaluate([]) == 0.0
    assert not run.engine._pending
    run.close()


@pytest.mark.parametrize("placement", ["two slots", STREAMED_STATE[1], "here and there on disk", "all on disk"])
def test_a_save_finds_every_home_final(placement):
    """What is written is what a flush would leave: state that was updated on the device is back in RAM by then."""
    config = tiny_config("qwen3")
    masters = tiny_masters(model_spec(config))
    fitting = _fitting("qwen3", PLACEMENTS[placement])
    chaos = Chaos(1, max_delay_s=0.005)
    run = Streamed(config, masters, TOKENS, precision="bf16", placement=fitting, chaos=chaos)
    run.train(batches()[:2], HYPERS[:2])
    written = {}

    def write(segment: str) -> None:
        written.update({(segment, kind): run.store.flat(segment, kind).clone() for kind in ("w", "lo", "m", "v")})

    run.engine.save(write)
    for (segment, kind), flat in written.items():
        with run.store.visit(segment):
            assert flat.equal(run.store.flat(segment, kind)), (segment, kind)
    other = Streamed(config, masters, TOKENS, precision="bf16")
    other.train(batches()[:2], HYPERS[:2])
    assert same_bytes(run.state(), other.state()) == []
    for each in (run, other):
        each.close()


def test_after_a_failed_program_nothing_is_trained_evaluated_or_saved():
    config = tiny_config("llama")
    run = Streamed(config, tiny_masters(model_spec(config)), TOKENS, precision="fp32")
    good = batches()
    run.train(good[:1], HYPERS[:1])
    broken = good[1][0]._replace(input_ids_T=good[1][0].input_ids_T + 10_000)
    with pytest.raises(IndexError):
        run.train([[broken]], HYPERS[1:2])
    for reuse in (run.engine.flush, lambda: run.engine.save(print), lambda: run.engine.evaluate(good[0])):
        with pytest.raises(RuntimeError, match="resume from a checkpoint"):
            reuse()
    run.close()


def test_layer_calls_are_dropped_at_their_last_use():
    config = tiny_config("gemma3")
    run = Streamed(config, tiny_masters(model_spec(config)), TOKENS, precision="fp32")
    run.train(batches()[:1], HYPERS[:1])
    assert run.engine._handlers.step.calls == {}
    run.engine.evaluate(batches()[0])
    assert run.engine._handlers.step.calls == {}
    run.close()


def test_an_evaluation_in_rounds_is_the_sum_of_its_micro_batches():
    config = tiny_config("llama")
    run = Streamed(
        config, tiny_masters(model_spec(config)), TOKENS, precision="fp32", placement=Placement(round_micro_batches=2)
    )
    one_by_one = [run.engine.evaluate([batch]) for batch in batches()[0]]
    assert run.engine.evaluate(batches()[0]) == sum(one_by_one)
    run.close()


@pytest.mark.parametrize(
    "placement", ["two slots", "two passes, all on disk", STREAMED_STATE[1], "here and there on disk"]
)
def test_a_non_finite_step_applies_nothing(placement):
    config = tiny_config("llama")
    masters = tiny_masters(model_spec(config))
    broken = {name: value.copy() for name, value in masters.items()}
    broken["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf
    run = Streamed(config, broken, TOKENS, precision="fp32", placement=_fitting("llama", PLACEMENTS[placement]))
    before = run.state()
    (result,) = run.train(batches()[:1], HYPERS[:1])
    assert not result.applied
    assert result.bad_tensor is not None
    assert same_bytes(before, run.state()) == []
    assert run.engine.applied_steps == 0
    run.close()


def trained_with_frozen(config, masters, freeze):
    """The state after training with `freeze`, having proven that it is the reference's."""
    run = Streamed(config, masters, TOKENS, precision="fp32", freeze=freeze)
    run.train(batches(), HYPERS)
    state = run.state()
    run.close()
    want = reference.train(
        config, masters, batches(), HYPERS, precision="fp32", max_grad_norm=1.0, chunk_tokens=CHUNK_TOKENS,
        attn_implementation="megatrain", freeze=freeze,
    )  # fmt: skip
    assert same_bytes(state, want.state) == []
    return state


def test_a_tied_embedding_can_be_frozen_beside_trained_positions():
    config = tiny_config("gpt2")
    masters = tiny_masters(model_spec(config))
    state = trained_with_frozen(config, masters, ["wte"])
    assert state["transformer.wte.weight"][0].tobytes() == masters["transformer.wte.weight"].tobytes()


def test_frozen_tensors_keep_every_bit_and_have_no_state():
    config = tiny_config("qwen2")
    masters = tiny_masters(model_spec(config))
    state = trained_with_frozen(config, masters, ["embed_tokens", r"layers\.1\.", r"k_proj\.bias"])
    frozen = [name for name in masters if "embed_tokens" in name or ".layers.1." in name or "k_proj.bias" in name]
    assert len(frozen) > 10
    for name in frozen:
        assert state[name][0].tobytes() == masters[name].tobytes()


@pytest.mark.parametrize("placement", [TWO_SLOTS, Placement(two_pass=True)], ids=["deferred", "two passes"])
def test_ctrl_c_right_behind_a_program_loses_no_update_and_counts_it(
    monkeypatch: pytest.MonkeyPatch, placement: Placement
) -> None:
    config = tiny_config("llama")
    masters = tiny_masters(model_spec(config))
    runs = [Streamed(config, masters, TOKENS, precision="fp32", placement=p) for p in (placement, TWO_SLOTS)]
    run, other = runs
    run.train(batches()[:1], HYPERS[:1])

    def interrupted(_trace: Trace) -> dict[str, float]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Trace, "busy_s", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.train(batches()[1:2], HYPERS[1:2])
    assert run.engine.applied_steps == 2
    run.train(batches()[2:], HYPERS[2:])
    other.train(batches(), HYPERS)
    assert same_bytes(run.state(), other.state()) == []
    for each in runs:
        each.close()


def test_a_step_that_the_plan_refuses_leaves_the_engine_as_it_was() -> None:
    config = tiny_config("llama")
    masters = tiny_masters(model_spec(config))
    placement = Placement(two_pass=True, round_micro_batches=2)
    runs = [Streamed(config, masters, TOKENS, precision="fp32", placement=p) for p in (placement, TWO_SLOTS)]
    (steps, *_) = batches()
    with pytest.raises(PlanError, match="5 micro-batches and a round 2"):
        runs[0].train([steps], HYPERS[:1])
    for run in runs:
        run.train([steps[:2]], HYPERS[:1])
    assert same_bytes(runs[0].state(), runs[1].state()) == []
    for run in runs:
        run.close()

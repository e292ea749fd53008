"""Kept attention: no bit changes, the recomputation does not attend again, and what cannot be kept is refused."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.errors import PlanError
from megatrain.models import attention_cpu
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from megatrain.planner.sizes import refuse_unkept
from megatrain.schedule import Place
from tests.engine.streamed import Placement, Streamed, make_plan, same_bytes
from tests.families import CASES, mostly_slow, tiny_batch, tiny_buffers, tiny_config, tiny_masters

TOKENS = 24
HYPERS = [AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1) for _ in range(2)]
STEPS = [[tiny_batch(cut, seed=10 * step + i) for i, cut in enumerate([(11, 13), (24,)])] for step in range(2)]
KEPT = Placement(keep_attention=True)
ROUNDS = Placement(keep_attention=True, round_micro_batches=1, weight_slots=3)
# grouped heads; a window; soft-cap; sinks and experts; experts; values of another size; some layers that do not attend
QUICK = ("qwen2", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3", "jamba", "falcon_h1")


@functools.cache
def spec_of(case: str) -> ModelSpec:
    return model_spec(tiny_config(case))


def trained(case: str, precision: str, placement: Placement, compiled: bool = False, **changes: Any) -> tuple:
    """(losses and norms, state) after two steps of two micro-batches, one of them of two documents."""
    config = tiny_config(case, **changes)
    masters = tiny_masters(model_spec(config))
    run = Streamed(config, masters, TOKENS, precision=precision, placement=placement, compiled=compiled)
    try:
        for name, value in tiny_buffers(run.template).items():
            run.template.saved_buffers[name].copy_(value)
        results = run.train(STEPS, HYPERS)
        return [(r.loss, r.grad_norm) for r in results], run.state()
    finally:
        run.close()


def assert_same(left: tuple, right: tuple) -> None:
    assert left[0] == right[0], "losses and norms"
    assert same_bytes(left[1], right[1]) == []


@pytest.mark.parametrize("case", mostly_slow([*CASES], *QUICK))
def test_kept_attention_changes_no_bit(case: str) -> None:
    """Of blocks that cannot keep it, too: they recompute."""
    precision = "bf16" if [*CASES].index(case) % 2 else "fp32"
    assert_same(trained(case, precision, KEPT), trained(case, precision, Placement()))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.2}),
        ("mixtral", {"router_jitter_noise": 0.1, "output_router_logits": True}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_nor_with_dropout_and_router_loss(case: str, changes: dict[str, Any], precision: str) -> None:
    plain = trained(case, precision, Placement(), **changes)
    assert_same(trained(case, precision, ROUNDS, **changes), plain)
    without = trained(case, precision, KEPT, **{name: 0.0 for name in changes if name != "output_router_logits"})
    assert without[0] != plain[0], "the dice must be alive"


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_nor_in_compiled_layers(case: str) -> None:
    """The layer that is lent its attention is another graph: it must give what the first one gave."""
    assert_same(trained(case, "bf16", KEPT, compiled=True), trained(case, "bf16", Placement(), compiled=True))
    half = Placement(keep_attention=True, resident=frozenset({"L000"}), two_pass=True)
    assert_same(trained(case, "bf16", half, compiled=True), trained(case, "bf16", Placement(), compiled=True))


@pytest.mark.parametrize(("placement", "passes"), [(Placement(), 3), (KEPT, 2), (ROUNDS, 2), (Placement(keep=True), 2)])
def test_what_is_kept_is_not_computed_again(placement: Placement, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of forward, forward again and backward, each of which cuts the pack into its documents once."""
    cuts: list[int] = []

    def counted(document_ids_T: torch.Tensor, num_tokens: int) -> list[slice]:
        cuts.append(num_tokens)
        return cut(document_ids_T, num_tokens)

    cut = attention_cpu.documents
    monkeypatch.setattr(attention_cpu, "documents", counted)
    trained("llama", "fp32", placement)
    num_micro_batches = sum(map(len, STEPS))
    assert len(cuts) == passes * num_micro_batches * len(spec_of("llama").blocks)


def test_nothing_of_a_step_stays_behind_in_the_template() -> None:
    """A view of a place would keep the whole arena alive, and what attention gave a micro-batch's worth of memory."""
    config = tiny_config("llama")
    run = Streamed(config, tiny_masters(spec_of("llama")), TOKENS, precision="fp32", placement=KEPT)
    run.train(STEPS[:1], HYPERS[:1])
    exchange = run.template._exchange
    assert exchange.lent is None
    assert exchange.given is None
    run.close()


def test_the_backward_uses_what_lies_in_its_place() -> None:
    """A changed place changes the result: nothing else is looked at."""
    config = tiny_config("llama")
    results = []
    for factor in (1.0, 1.5):
        run = Streamed(config, tiny_masters(model_spec(config)), TOKENS, precision="fp32", placement=KEPT)
        handlers = run.engine._handlers
        attended = handlers._attended

        def spoilt(places, attended=attended, factor=factor):
            found = attended(places)
            if factor != 1.0 and any(place.pool == "dact" for place in places):  # a BACKWARD reads
                found.out_1THE.mul_(factor)
            return found

        handlers._attended = spoilt
        (result,) = run.train(STEPS[:1], HYPERS[:1])
        results.append((result.loss, result.grad_norm))
        run.close()
    assert results[0][0] == results[1][0]
    assert results[0][1] != results[1][1]


@pytest.mark.parametrize("case", [*CASES])
def test_a_place_has_the_shape_of_what_attention_gives(case: str) -> None:
    """`block` copies it there, and broadcasting must not hide a wrong one."""
    spec = spec_of(case)
    config = tiny_config(case)
    run = Streamed(config, tiny_masters(spec), TOKENS, precision="fp32", placement=KEPT)
    seen = {}

    def noted(index: int, *args: Any, **kwargs: Any) -> Any:
        out = apply(index, *args, **(kwargs | {"keeps": True}))
        seen[index] = [tuple(map(tuple, (one.out_1THE.shape, one.lse_1HT.shape))) for one in out.attended]
        return out

    apply, run.template.apply_block = run.template.apply_block, noted
    run.engine.evaluate(STEPS[0][:1])
    assert len(seen) == len(spec.blocks)
    for index, shape in enumerate(spec.attention):
        places = [run.engine._handlers.places.attended(Place("attn", index, 0))] if shape.can_be_kept else []
        assert seen[index] == [(tuple(a.out_1THE.shape), tuple(a.lse_1HT.shape)) for a in places], index
    run.close()


@pytest.mark.parametrize(
    ("case", "how"), [("diffllama", "more than once"), ("llama4", "more than once"), ("mamba", "not at all")]
)
def test_a_block_that_does_not_attend_once_is_refused_by_name(case: str, how: str) -> None:
    plan = make_plan(spec_of(case), KEPT)
    assert {block.activations for block in plan.blocks} == {"recompute"}
    segments = [replace(s, activations="keep_attention") if s.name == "L001" else s for s in plan.segments]
    with pytest.raises(PlanError, match=rf"L001 has activations 'keep_attention'.*attends {how}.*use 'recompute'"):
        refuse_unkept(spec_of(case), replace(plan, segments=tuple(segments)))

"""The balancing loss of routers: the engine's is the reference's bit for bit, and the reference's is transformers'."""

from __future__ import annotations

import functools
import sys

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from megatrain.errors import ModelError
from megatrain.models.batch import TokenBatch
from megatrain.models.meta import architecture_of
from megatrain.models.router import ROUTERS, balance_of, tally_of
from megatrain.models.spec_of import model_spec
from megatrain.models.template import ModelTemplate
from megatrain.optim import AdamW
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes
from tests.families import CASES, mostly_slow, tiny_batch, tiny_buffers, tiny_config, tiny_masters

CPU = torch.device("cpu")
COEFFICIENT = 0.7  # so large that every weight feels it


def has_router(case: str) -> bool:
    """Whether the installed transformers names the routers of the case's family as newer ones do."""
    name = ROUTERS.get(architecture_of(tiny_config(case)), "")
    return name in vars(sys.modules[MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(case))].__module__])


BALANCED = [case for case in CASES if has_router(case)]
TOKENS = 24
HYPERS = [AdamW(1e-2 / (k + 1), 0.9, 0.95, 1e-8, 0.1) for k in range(2)]
STEPS = [[tiny_batch(cut, seed=10 * step + i) for i, cut in enumerate([(11, 13), (24,)])] for step in range(2)]


def padded(batch: TokenBatch, num_padding: int) -> TokenBatch:
    """The last tokens of a batch as the padded tail: a document of its own without labels."""
    ids, labels = batch.document_ids_T.clone(), batch.labels_T.clone()
    ids[-num_padding:] = 1000
    labels[-num_padding - 1 :] = -100
    return batch._replace(document_ids_T=ids, labels_T=labels)


STEPS[1][1] = padded(STEPS[1][1], 7)


def balanced_config(case: str, **changes: bool) -> PreTrainedConfig:
    name = "aux_loss_coef" if case == "jetmoe" else "router_aux_loss_coef"
    return tiny_config(case, **{"output_router_logits": True, name: COEFFICIENT}, **changes)


def formula(config: PreTrainedConfig) -> reference.RouterLoss:
    """The reference's own: what the config says, read where transformers reads it."""
    architecture = architecture_of(config)
    model = AutoModelForCausalLM.from_config(config)
    coefficient = model.aux_loss_coef if architecture == "JetMoeForCausalLM" else model.router_aux_loss_coef
    return reference.RouterLoss(coefficient, model.num_experts, model.num_experts_per_tok, ROUTERS[architecture])


@functools.lru_cache(maxsize=4)
def wanted(case: str, precision: str) -> reference.Result:
    config = balanced_config(case)
    template = ModelTemplate(config, CPU, torch.float32)
    return reference.train(
        config, tiny_masters(template.spec), STEPS, HYPERS, precision=precision, max_grad_norm=0.1,
        chunk_tokens=CHUNK_TOKENS, buffers=tiny_buffers(template), router_loss=formula(config),
    )  # fmt: skip


def trained(config: PreTrainedConfig, precision: str, placement: Placement) -> tuple[list[float], list[float], dict]:
    masters = tiny_masters(model_spec(config))
    run = Streamed(config, masters, TOKENS, precision=precision, max_grad_norm=0.1, placement=placement)
    try:
        for name, value in tiny_buffers(run.template).items():
            run.template.saved_buffers[name].copy_(value)
        results = run.train(STEPS, HYPERS)
        return [r.loss for r in results], [r.grad_norm for r in results], run.state()
    finally:
        run.close()


def differing(case: str, found: tuple[list[float], list[float], dict], want: reference.Result) -> str:
    """The family, and what of it is not the reference's; empty: nothing."""
    losses, norms, state = found
    parts = [f"loss {losses} for {want.losses}"] if losses != want.losses else []
    parts += [f"norm {norms} for {want.grad_norms}"] if norms != want.grad_norms else []
    parts += same_bytes(state, want.state)[:6]
    return f"{case}: {', '.join(parts)}" if parts else ""


@pytest.mark.parametrize("case", mostly_slow(BALANCED, "mixtral", "jetmoe", "gpt_oss", "qwen3_next", "jamba"))
def test_two_steps_with_a_router_loss_are_the_references(case: str) -> None:
    told = differing(case, trained(balanced_config(case), "fp32", Placement()), wanted(case, "fp32"))
    assert not told, told


@pytest.mark.parametrize("case", ["mixtral", "jetmoe"])
@pytest.mark.parametrize(
    ("precision", "placement"),
    [
        ("bf16", Placement()),
        ("bf16", Placement(keep=True, round_micro_batches=1)),
        ("fp32", Placement(offload=True, weight_slots=3, round_micro_batches=1)),
    ],
    ids=["bf16-recompute", "bf16-keep-rounds", "fp32-offload-rounds"],
)
def test_no_placement_changes_a_bit_of_a_router_loss(case: str, precision: str, placement: Placement) -> None:
    told = differing(case, trained(balanced_config(case), precision, placement), wanted(case, precision))
    assert not told, told


@pytest.mark.parametrize("case", ["mixtral", "qwen3_next", "gpt_oss", "ernie4_5_moe"])
def test_router_loss_is_that_of_transformers(case: str) -> None:
    """Its own loss, the whole model in one call: token losses plus the balancing loss, and its gradients."""
    config = balanced_config(case, tie_word_embeddings=False)
    torch.manual_seed(0)
    whole = reference.whole(config, torch.float32, "eager")
    batch = tiny_batch([24], seed=3)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(whole.model.state_dict()[name])
    labels = torch.cat([torch.zeros(1, dtype=torch.int64), batch.labels_T[:-1]])  # theirs shift for themselves
    whole.packing.lengths_tokens = (24,)
    told = theirs(input_ids=batch.input_ids_T[None], labels=labels[None], output_router_logits=True)
    told.loss.backward()
    num_supervised = int((batch.labels_T >= 0).sum())
    sums = {n: torch.zeros(p.shape) for n, p in whole.model.named_parameters()}
    loss = reference.add_gradients(whole, batch, sums, 1.0 / num_supervised, CHUNK_TOKENS, 0.0, formula(config))
    assert float(told.aux_loss.detach()) > 0.5
    torch.testing.assert_close(loss / num_supervised, told.loss.detach().double(), rtol=1e-5, atol=1e-6)
    for name, parameter in theirs.named_parameters():
        if name in sums and parameter.grad is not None:
            torch.testing.assert_close(sums[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_the_loss_is_felt_by_every_router_and_off_by_default() -> None:
    config = balanced_config("mixtral")
    _, _, with_it = trained(config, "fp32", Placement())
    _, _, without = trained(tiny_config("mixtral", router_aux_loss_coef=COEFFICIENT), "fp32", Placement())
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.gate.weight"
        assert with_it[name][0].tobytes() != without[name][0].tobytes()
    assert balance_of(tiny_config("mixtral"), "MixtralForCausalLM") is None


@pytest.mark.parametrize("freeze", [[r"layers\.0\."], [r"layers\.1\."], ["layers", "embed"]])
def test_frozen_layers_count_too(freeze: list[str]) -> None:
    """A router that is not trained still chooses: the others' gradients, and the loss, depend on its choices."""
    config = balanced_config("mixtral")
    masters = tiny_masters(model_spec(config))
    run = Streamed(config, masters, TOKENS, precision="fp32", freeze=freeze)
    losses, state = [result.loss for result in run.train(STEPS, HYPERS)], run.state()
    run.close()
    want = reference.train(
        config, masters, STEPS, HYPERS, precision="fp32", max_grad_norm=1.0, chunk_tokens=CHUNK_TOKENS,
        freeze=freeze, router_loss=formula(config),
    )  # fmt: skip
    assert losses == want.losses
    assert same_bytes(state, want.state) == []


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"router_jitter_noise": 0.1}], ids=["plain", "jitter"])
def test_compiled_layers_let_their_routers_be_heard(changes: dict[str, float]) -> None:
    """One graph for forward, recomputation and kept forward, dice included: the same bits whichever is used."""
    config = balanced_config("mixtral")
    config.update(changes)
    masters, states = tiny_masters(model_spec(config)), []
    torch._dynamo.reset()
    for placement in (Placement(), Placement(keep=True, round_micro_batches=1)):
        run = Streamed(config, masters, TOKENS, precision="bf16", placement=placement, compiled=True)
        run.train(STEPS, HYPERS)
        states.append(run.state())
        run.close()
    assert same_bytes(*states) == []
    name = "model.layers.1.mlp.gate.weight"
    _, _, without = trained(tiny_config("mixtral"), "bf16", Placement())
    assert states[0][name][0].tobytes() != without[name][0].tobytes()


def test_evaluation_has_none() -> None:
    sums = []
    for config in (balanced_config("mixtral"), tiny_config("mixtral")):
        run = Streamed(config, tiny_masters(model_spec(config)), TOKENS, precision="fp32")
        sums.append(run.engine.evaluate(STEPS[0]))
        run.close()
    assert sums[0] == sums[1]


def test_documents_without_a_label_do_not_count() -> None:
    batch = padded(tiny_batch([9, 15]), 7)
    tally = tally_of(batch)
    assert tally.counted_T.tolist() == [1.0] * 17 + [0.0] * 7
    assert float(tally.num_supervised) == int((batch.labels_T >= 0).sum())


def test_a_micro_batch_without_labels_adds_nothing() -> None:
    config = balanced_config("mixtral")
    empty = tiny_batch([24], seed=5)
    empty = empty._replace(labels_T=torch.full_like(empty.labels_T, -100))
    states = []
    for micro_batches in ([STEPS[0][0], empty], [STEPS[0][0]]):
        run = Streamed(config, tiny_masters(model_spec(config)), TOKENS, precision="fp32")
        assert run.train([micro_batches], HYPERS[:1])[0].applied
        states.append(run.state())
        run.close()
    assert same_bytes(*states) == []


@pytest.mark.parametrize(
    ("case", "changes", "what"),
    [
        ("deepseek_v3", {"output_router_logits": True}, "transformers has no router loss for DeepseekV3ForCausalLM"),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": -1.0}, "router_aux_loss_coef -1.0"),
        ("bamba", {"z_loss_coefficient": 0.001}, "z_loss_coefficient 0.001"),
    ],
)
def test_refused(case: str, changes: dict[str, object], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        model_spec(tiny_config(case, **changes))

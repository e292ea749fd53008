"""On a GPU: kept attention changes no bit, eager and compiled, and takes no memory but its places."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.chaos import Chaos
from megatrain.models.attention import attention
from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from tests.engine.streamed import Placement, Streamed, same_bytes
from tests.families import tiny_batch, tiny_buffers, tiny_config, tiny_masters

pytestmark = pytest.mark.gpu

TOKENS = 256
HYPERS = [AdamW(1e-2 / (k + 1), 0.9, 0.95, 1e-8, 0.1) for k in range(3)]
CUTS = [(100, 156), (256,), (17, 19, 120, 100)]
KEPT = Placement(keep_attention=True, threads=2)
SOME = Placement(keep_attention=True, resident=frozenset({"L000"}), round_micro_batches=2, weight_slots=3, threads=2)


def batches() -> list[list[TokenBatch]]:
    made = [[tiny_batch(cut, seed=10 * step + i) for i, cut in enumerate(CUTS)] for step in range(len(HYPERS))]
    return [[TokenBatch(*(tensor.cuda() for tensor in batch)) for batch in step] for step in made]


def trained(
    case: str, precision: str, placement: Placement, compiled: bool = False, chaos: Chaos | None = None
) -> tuple:
    """(losses and norms, state, bytes that the framework's pool grew by after the second step)."""
    config = tiny_config(case)
    run = Streamed(
        config, tiny_masters(model_spec(config)), TOKENS, precision=precision, placement=placement, chaos=chaos,
        device="cuda", compiled=compiled,
    )  # fmt: skip
    try:
        for name, value in tiny_buffers(run.template).items():
            run.template.saved_buffers[name].copy_(value)
        steps = batches()
        results = run.train(steps[:2], HYPERS[:2])
        before_bytes = torch.cuda.memory_reserved()
        results += run.train(steps[2:], HYPERS[2:])
        grown_bytes = torch.cuda.memory_reserved() - before_bytes
        return [(r.loss, r.grad_norm) for r in results], run.state(), grown_bytes
    finally:
        run.close()


def assert_same(left: tuple, right: tuple) -> None:
    assert left[0] == right[0], "losses and norms"
    assert same_bytes(left[1], right[1]) == []


# grouped heads; window; soft-cap; sinks and experts; values of another size; some layers that do not attend
@pytest.mark.parametrize("case", ["qwen2", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "falcon_h1"])
def test_kept_attention_changes_no_bit(case: str) -> None:
    precision = "fp32" if case in ("mistral", "gemma3") else "bf16"
    plain = trained(case, precision, Placement(threads=2))
    assert_same(trained(case, precision, KEPT), plain)
    assert_same(trained(case, precision, SOME), plain)


@pytest.mark.parametrize("case", ["gemma2", "deepseek_v3"])
def test_nor_in_compiled_layers(case: str) -> None:
    """The layer that is lent its attention is another graph: it must give what the first one gave."""
    plain = trained(case, "bf16", Placement(threads=2), compiled=True)
    kept = trained(case, "bf16", KEPT, compiled=True)
    assert_same(kept, plain)
    assert kept[2] == 0, "memory was taken after step 2"


def test_late_lanes_change_no_bit() -> None:
    plain = trained("qwen2", "bf16", Placement(threads=2))
    for seed in range(4):
        assert_same(trained("qwen2", "bf16", SOME, chaos=Chaos(seed, max_delay_s=0.002)), plain)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "value_size"), [(0, 0.0, False, 128), (300, 0.0, True, 128), (0, 20.0, False, 64)]
)
def test_the_operator_gives_back_what_it_is_lent(
    window: int, softcap: float, sinks: bool, value_size: int, deterministic: bool
) -> None:
    """At the sizes of real layers; the gradients too where they repeat."""
    generator = torch.Generator("cuda").manual_seed(0)
    heads, groups, tokens = 8, 2, 2048
    shapes = [(1, heads, tokens, 128), (1, groups, tokens, 128), (1, groups, tokens, value_size)]
    made = [torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes]
    made += [torch.randn(heads, generator=generator, device="cuda", dtype=torch.bfloat16)] if sinks else []
    ids = torch.repeat_interleave(
        torch.arange(3, device="cuda", dtype=torch.int32), torch.tensor([700, 1, 1347]).cuda()
    )

    def run(lent=None):
        leaves = [x.detach().requires_grad_() for x in made]
        attended = attention(
            *leaves[:3], ids, leaves[3] if sinks else None, scale=128**-0.5, window=window, softcap=softcap,
            deterministic=deterministic, lent=lent,
        )  # fmt: skip
        return attended, torch.autograd.grad(attended.out_1THE, leaves, torch.ones_like(attended.out_1THE))

    first, gradients = run()
    again, same_gradients = run(first)
    for one, other in zip((*first, *gradients), (*again, *same_gradients), strict=True):
        assert torch.equal(one, other)
    assert again.out_1THE.data_ptr() != first.out_1THE.data_ptr()

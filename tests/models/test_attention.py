"""The attention operator on the CPU: against the formula, against the eager attention of transformers, and its bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.errors import ModelError
from megatrain.models.attention import attention

# name -> (document lengths, query heads, key/value heads, D, E, window, softcap, sinks)
CASES = {
    "plain": ((300,), 4, 2, 16, 16, 0, 0.0, False),
    "packed": ((1, 130, 5, 128, 40), 4, 4, 8, 8, 0, 0.0, False),
    "window": ((300, 20), 4, 2, 16, 16, 33, 0.0, False),
    "window of a block": ((400,), 2, 1, 16, 16, 128, 0.0, False),
    "window of one": ((140,), 2, 1, 16, 16, 1, 0.0, False),
    "softcap": ((150, 30), 6, 2, 16, 16, 0, 2.0, False),
    "sinks": ((150, 30), 6, 3, 16, 16, 50, 0.0, True),
    "all at once, wide values": ((7, 260), 4, 1, 8, 24, 70, 1.5, True),
}


def truth(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, sinks: Tensor | None, scale: float, window: int, cap: float):
    """The formula, with the T x T matrix that the operator never builds. Returns (out_1THE, lse_1HT)."""
    repeats, num_tokens = q.shape[1] // k.shape[1], q.shape[2]
    s = q @ k.repeat_interleave(repeats, 1).transpose(2, 3) * scale
    if cap:
        s = cap * torch.tanh(s / cap)
    age = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    seen = (age >= 0) & (ids[:, None] == ids) & (age < (window or num_tokens))
    s = s.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.view(1, -1, 1, 1).expand(1, -1, num_tokens, 1)], 3)
    p = s.softmax(3)[..., :num_tokens]
    return (p @ v.repeat_interleave(repeats, 1)).transpose(1, 2), s.logsumexp(3)


def inputs(lengths, heads, groups, size, size_v, sinks, dtype):
    num_tokens = sum(lengths)
    generator = torch.Generator().manual_seed(1)

    def leaf(h: int, d: int) -> Tensor:
        made = torch.randn(1, num_tokens, h, d, generator=generator, dtype=torch.float64)
        return made.to(dtype).transpose(1, 2).requires_grad_()

    ids = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    sink = torch.randn(heads, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() if sinks else None
    return leaf(heads, size), leaf(groups, size), leaf(groups, size_v), ids, sink


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str, deterministic: bool) -> None:
    lengths, heads, groups, size, size_v, window, cap, with_sinks = CASES[name]
    q, k, v, ids, sinks = inputs(lengths, heads, groups, size, size_v, with_sinks, torch.float64)
    want, want_lse = truth(q, k, v, ids, sinks, 0.3, window, cap)
    got, got_lse = attention(q, k, v, ids, sinks, scale=0.3, window=window, softcap=cap, deterministic=deterministic)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_lse, want_lse, rtol=1e-12, atol=1e-12)
    leaves = [x for x in (q, k, v, sinks) if x is not None]
    assert not got_lse.requires_grad
    dout = torch.randn(got.shape, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, leaves, dout), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def test_gradcheck() -> None:
    q, k, v, ids, sinks = inputs((3, 6), 2, 1, 3, 2, True, torch.float64)
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x[:3], ids, x[3], scale=0.5, window=4, softcap=2.0)[0], (q, k, v, sinks)
    )


def test_registered_correctly() -> None:
    q, k, v, ids, sinks = inputs((3, 6), 2, 1, 4, 4, True, torch.float32)
    for operator in (torch.ops.megatrain.attention.default, torch.ops.megatrain.attention_fast.default):
        torch.library.opcheck(operator, (q, k, v, ids, sinks, None, None, 0.5, 4, 2.0))
        torch.library.opcheck(operator, (q, k, v, ids, None, None, None, 0.5, 0, 0.0))


def test_bf16_is_computed_in_fp32() -> None:
    q, k, v, ids, sinks = inputs((150, 30), 4, 2, 16, 16, True, torch.bfloat16)
    out, _ = attention(q, k, v, ids, sinks, scale=0.25, window=40)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v, sinks)]
    want, _ = truth(*wide[:3], ids, wide[3], 0.25, 40, 0.0)
    torch.testing.assert_close(out, want.bfloat16(), rtol=2**-7, atol=1e-6)  # one rounding: at most one step
    dout = torch.randn(out.shape).bfloat16()
    got = torch.autograd.grad(out, (q, k, v, sinks), dout)
    for ours, theirs in zip(got, torch.autograd.grad(want, wide, dout.float()), strict=True):
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, rtol=2**-6, atol=0.02)


def _gradients(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, dout: Tensor, **options) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves, ids, **options)
    return [out.transpose(1, 2), lse.unsqueeze(3), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("window", [0, 40])
def test_a_document_has_the_same_bits_whatever_surrounds_it(window: int) -> None:
    q, k, v, _, _ = inputs((200,), 4, 2, 16, 16, False, torch.float32)
    dout = torch.randn(1, 200, 4, 16)
    alone = _gradients(q, k, v, torch.zeros(1, dtype=torch.int32), dout, scale=0.25, window=window)
    for before, after in ((1, 0), (77, 13), (0, 130)):
        ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor([before, 200, after]))
        other = [torch.full((1, h, before + after, 16), torch.nan) for h in (4, 2, 2)]  # a leak would be seen
        pack = [torch.cat([o[:, :, :before], x, o[:, :, before:]], 2) for o, x in zip(other, (q, k, v), strict=True)]
        around = torch.cat([torch.ones(1, before, 4, 16), dout, torch.ones(1, after, 4, 16)], 1)
        packed = _gradients(*pack, ids, around, scale=0.25, window=window)
        for x, y in zip(alone, packed, strict=True):
            assert torch.equal(x, y[:, :, before : before + 200])


def test_bits_do_not_hang_on_the_alignment_of_the_inputs() -> None:
    ids, dout = torch.zeros(1, dtype=torch.int32), torch.randn(1, 150, 4, 16)
    flat = torch.randn(150 * 4 * 16 + 3)
    results = []
    for offset in range(4):
        moved = torch.empty_like(flat)
        moved[offset : offset + 9600] = flat[:9600]
        q = moved[offset : offset + 9600].view(1, 4, 150, 16)
        results.append(_gradients(q, q, q, ids, dout, scale=0.25, window=0))
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_the_two_names_call_two_operators() -> None:
    ids = torch.zeros(1, 1, 1, 6, dtype=torch.int32)
    for name, operator in (("megatrain", "megatrain::attention"), ("megatrain-fast", "megatrain::attention_fast")):
        with Recorder() as called:
            _tiny("llama", name)(torch.zeros(1, 6, dtype=torch.int64), attention_mask=ids, use_cache=False)
        assert {x for x in called.names if x.startswith("megatrain::")} == {operator}


class Recorder(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_same_bits_twice() -> None:
    q, k, v, ids, _ = inputs((200, 60), 4, 2, 16, 16, False, torch.float32)
    dout = torch.randn(1, 260, 4, 16)
    first, second = (_gradients(q, k, v, ids, dout, scale=0.25, window=0) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
GROUPED = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 5},
    "gemma2": GROUPED | {"sliding_window": 5, "attn_logit_softcapping": 3.0},
    "gemma3_text": GROUPED | {"sliding_window": 5, "num_key_value_heads": 1},
    "gpt_oss": GROUPED | {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "attn_pdrop": 0.0},
}


@pytest.mark.parametrize("family", MODELS)
def test_models_agree_with_their_eager_attention(family: str) -> None:
    """Forward and gradients: a pack of three documents, against eager attention on each document alone."""
    lengths = (9, 3, 12)
    ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths)).view(1, 1, 1, -1)
    tokens = torch.randint(0, 64, (1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = zip(tokens.split(lengths, 1), positions.split(lengths, 1), strict=True)
    packed = {"input_ids": tokens, "position_ids": positions, "attention_mask": ids}
    calls = {"eager": [{"input_ids": t, "position_ids": p} for t, p in alone]}
    calls |= {"megatrain": [packed], "megatrain-fast": [packed]}
    results = []
    for implementation, inputs_of_calls in calls.items():
        model = _tiny(family, implementation)
        logits = torch.cat([model(**x, use_cache=False).logits for x in inputs_of_calls], 1)
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for got in results[1:]:
        for want, ours in zip(results[0], got, strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()) + 1e-7)


def _tiny(family: str, implementation: str) -> torch.nn.Module:
    config = AutoConfig.for_model(family, **MODELS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    assert model.config._attn_implementation == implementation
    torch.manual_seed(0)
    for parameter in model.parameters():  # zeros and ones would hide a lost sink or a dead head
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return model.eval()


def test_compiled_layer_sees_one_node() -> None:
    q, k, v, ids, _ = inputs((20, 10), 4, 2, 8, 8, False, torch.float32)
    compiled = torch.compile(
        lambda q, k, v: attention(q * 2, k, v, ids, scale=0.3)[0].sin(), fullgraph=True, backend="aot_eager"
    )
    want, got = attention(q * 2, k, v, ids, scale=0.3)[0].sin(), compiled(q, k, v)
    dout = torch.randn(want.shape)
    assert torch.equal(want, got)
    pairs = zip(torch.autograd.grad(want, (q, k, v), dout), torch.autograd.grad(got, (q, k, v), dout), strict=True)
    assert all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("implementation", ["megatrain", "megatrain-fast"])
def test_compiled_attention_of_a_model_is_one_graph(implementation: str) -> None:
    ids = torch.tensor([0, 0, 1, 1, 1, 2], dtype=torch.int32).view(1, 1, 1, 6)
    model, hidden = _tiny("gpt_oss", implementation), torch.randn(1, 6, 32)
    layer, rotary = model.model.layers[0].self_attn, model.model.rotary_emb(hidden, torch.arange(6)[None])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    want, got = (f(hidden, rotary, attention_mask=ids)[0] for f in (layer, compiled))
    assert torch.equal(want, got)


def test_what_is_not_understood_is_refused() -> None:
    tokens, ids = torch.zeros(1, 6, dtype=torch.int64), torch.zeros(1, 1, 1, 6, dtype=torch.int32)
    model = _tiny("llama", "megatrain")
    with pytest.raises(ModelError, match="document ids"):  # no mask: transformers would build one
        model(tokens)
    with pytest.raises(ModelError, match=r"torch.float32 of shape \(1, 1, 6, 6\)"):
        model(tokens, attention_mask=torch.zeros(1, 1, 6, 6), use_cache=False)
    with pytest.raises(ModelError, match="LlamaAttention passes position_bias"):
        model(tokens, attention_mask=ids, use_cache=False, position_bias=torch.zeros(1))
    with pytest.raises(ModelError, match="batch 1"):
        model(tokens.expand(2, 6), attention_mask=ids, use_cache=False)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelError, match="not causal"):
        model(tokens, attention_mask=ids, use_cache=False)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ModelError, match=r"dropout is 0\.1"):
        model.train()(tokens, attention_mask=ids, use_cache=False)

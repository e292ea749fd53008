"""Attention as one operator, registered with transformers as attn_implementation="megatrain" and "megatrain-fast".

Masks travel as data: int32 document ids of the tokens, shaped (1, 1, 1, T), in the place of the attention mask
(transformers hands masks of four dimensions through untouched), or (1, 1, 1, 1) for a pack that is one document.
Token t sees token s where both have the same document id, s <= t, and t - s < window (window 0: no window).

The operator is one opaque node in eager and in compiled code, and so is its backward. "megatrain" is bit-repeatable
from run to run. "megatrain-fast" may not be: on a GPU it takes cuDNN where that applies, and is the same elsewhere.

Out and lse are all that the backward needs beside the inputs. So who runs a layer may keep them, and lend them when the
layer is run again: the operator then gives them back without attending. An `Exchange` carries them in and out.

Legend: 1 batch of one, H query heads, G key/value heads (H a multiple of G), T tokens, D head size of queries and keys,
E of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from megatrain.errors import ModelError
from megatrain.models import attention_cpu

if torch.version.cuda is not None:  # a framework built for CUDA brings Triton along
    from megatrain.models import attention_cuda

NAME = "megatrain"
NAME_FAST = "megatrain-fast"

# What layers hand along that says nothing about the scores: their other outputs, and positions already in q and k.
_SAYS_NOTHING = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "num_items_in_batch", "use_cache", "return_dict"}
    | {"output_hidden_states", "output_router_logits"}
)

_FORWARD_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor document_ids, Tensor? sinks, Tensor? lent_out, Tensor? lent_lse,"
    " float scale, int window, float softcap) -> (Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor document_ids, Tensor? sinks, Tensor out, Tensor lse,"
    " float scale, int window, float softcap) -> (Tensor, Tensor, Tensor, Tensor)"
)


class Attended(NamedTuple):
    """What attention gave."""

    out_1THE: Tensor  # in the dtype of the queries
    lse_1HT: Tensor  # fp32


@dataclass
class Exchange:
    """Between the attentions of one model and who runs its layers, one layer at a time."""

    lent: Attended | None = None  # what the coming attention is to give again; None: it attends
    given: list[Attended] | None = None  # where attentions leave copies of what they gave; None: they leave nothing


_EXCHANGE = "attention_exchange"  # attribute of an attention module


def connect(module: nn.Module, exchange: Exchange) -> None:
    """Let what the attention `module` gives pass through `exchange`."""
    setattr(module, _EXCHANGE, exchange)


def attention(
    q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, document_ids_T: Tensor, sinks_H: Tensor | None = None,
    *, scale: float, window: int = 0, softcap: float = 0.0, deterministic: bool = True, lent: Attended | None = None,
) -> Attended:  # fmt: skip
    """Causal attention within documents. The lse has no gradient.

    `document_ids_T`: int32, non-decreasing; of size 1 for one document. `window` 0: none. `softcap` 0: none.
    `lent`: what the same inputs gave before. Copies of it are returned, and nothing is computed before the backward.
    """
    operator = _exact if deterministic else _fast
    kept = (None, None) if lent is None else lent
    return Attended(*operator(q_1HTD, k_1GTD, v_1GTE, document_ids_T, sinks_H, *kept, scale, window, softcap))


def _unless_lent(attend: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`attend`, or copies of what is lent: an operator may not return its inputs."""

    def run(
        q_1HTD: Tensor, k_1GTD: Tensor, v_1GTE: Tensor, document_ids_T: Tensor, sinks_H: Tensor | None,
        lent_out_1THE: Tensor | None, lent_lse_1HT: Tensor | None, scale: float, window: int, softcap: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if lent_out_1THE is not None and lent_lse_1HT is not None:
            return lent_out_1THE.clone(), lent_lse_1HT.clone()
        return attend(q_1HTD, k_1GTD, v_1GTE, document_ids_T, sinks_H, scale, window, softcap)

    return run


def _make_operator(name: str, deterministic: bool) -> Any:
    backward_operator = torch.library.custom_op(
        f"{name}_backward", attention_cpu.backward, mutates_args=(), device_types="cpu", schema=_BACKWARD_SCHEMA
    )
    operator = torch.library.custom_op(
        name, _unless_lent(attention_cpu.forward), mutates_args=(), device_types="cpu", schema=_FORWARD_SCHEMA
    )
    if torch.version.cuda is not None:
        attend = attention_cuda.forward if deterministic else attention_cuda.forward_fast
        operator.register_kernel("cuda", _unless_lent(attend))
        backward_operator.register_kernel(
            "cuda", attention_cuda.backward if deterministic else attention_cuda.backward_fast
        )

    def backward(ctx: Any, dout_1THE: Tensor, _dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q_1HTD, k_1GTD, v_1GTE, document_ids_T, sinks_H, out_1THE, lse_1HT = ctx.saved_tensors
        dq, dk, dv, dsinks = backward_operator(
            dout_1THE, q_1HTD, k_1GTD, v_1GTE, document_ids_T, sinks_H, out_1THE, lse_1HT, *ctx.numbers
        )
        return dq, dk, dv, None, None if sinks_H is None else dsinks, None, None, None, None, None

    operator.register_fake(_forward_fake)
    backward_operator.register_fake(_backward_fake)
    operator.register_autograd(backward, setup_context=_keep_for_backward)
    return operator


def _forward_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Shapes only; takes and returns what the operator does."""
    q_1HTD, _, v_1GTE = inputs[:3]
    _, num_heads, num_tokens, _ = q_1HTD.shape
    lse_dtype = torch.float64 if q_1HTD.dtype == torch.float64 else torch.float32
    out_1THE = q_1HTD.new_empty(1, num_tokens, num_heads, v_1GTE.shape[3])
    return out_1THE, q_1HTD.new_empty(1, num_heads, num_tokens, dtype=lse_dtype)


def _backward_fake(*inputs: Any) -> tuple[Tensor, ...]:
    """Shapes only; takes and returns what `attention_cpu.backward` does."""
    _, q_1HTD, k_1GTD, v_1GTE, _, sinks_H = inputs[:6]
    dsinks_H = q_1HTD.new_empty(0) if sinks_H is None else torch.empty_like(sinks_H)
    return *attention_cpu.empty_gradients(q_1HTD, k_1GTD, v_1GTE), dsinks_H


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.numbers = inputs[7:]
    ctx.mark_non_differentiable(output[1])


_exact = _make_operator("megatrain::attention", deterministic=True)
_fast = _make_operator("megatrain::attention_fast", deterministic=False)


def _hf_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, is_causal: bool | None = None,
    *, deterministic: bool = True, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The attention function of transformers, over `attention`. What it does not understand, it refuses."""
    kind = type(module).__name__
    if dropout:
        raise ModelError(f"{kind}: attention dropout is {dropout}; set attention_dropout to 0 in the model's config")
    if not (module.is_causal if is_causal is None else is_causal):
        raise ModelError(f"{kind} is not causal; only causal decoders can be trained")
    for name, given in others.items():
        if given is not None and given is not False and name not in _SAYS_NOTHING:
            raise ModelError(f"{kind} passes {name} to its attention, which megatrain does not know; use another model")
    _check_shapes(kind, query, key, value, attention_mask)
    exchange: Exchange | None = vars(module).get(_EXCHANGE)
    attended = attention(
        query, key, value, attention_mask.reshape(-1), s_aux,
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling), window=sliding_window or 0,
        softcap=softcap or 0.0, deterministic=deterministic, lent=None if exchange is None else exchange.lent,
    )  # fmt: skip
    if exchange is not None and exchange.given is not None:
        # Copies: where a compiled graph breaks around an attention, torch 2.13 gives a view of out as one result and
        # its alias without a gradient as another, and the first loses its gradient: attention was not trained at all.
        exchange.given.append(Attended(*(x.detach().clone() for x in attended)))
    return attended.out_1THE, None


def _check_shapes(kind: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    batch, num_heads, num_tokens, _ = query.shape
    if mask is None or mask.dim() != 4 or mask.dtype != torch.int32 or mask.numel() not in (1, num_tokens):
        got = "nothing" if mask is None else f"{mask.dtype} of shape {tuple(mask.shape)}"
        raise ModelError(
            f"{kind}: {got} arrived as mask; pass attention_mask = int32 document ids (1, 1, 1, {num_tokens})"
        )
    if batch != 1 or key.shape[2] != num_tokens or value.shape[2] != num_tokens:
        raise ModelError(
            f"{kind}: queries {tuple(query.shape)} and keys {tuple(key.shape)} must be one pack of as many tokens; "
            "use batch 1 and no key/value cache"
        )
    if num_heads % key.shape[1] or key.shape[1] != value.shape[1]:
        raise ModelError(f"{kind}: {num_heads} query heads do not divide into {key.shape[1]} key/value heads")


def _refuse_to_build_mask(*_args: Any, **_kwargs: Any) -> None:
    """Called by transformers where the mask is not document ids already; a T x T mask is never built."""
    raise ModelError("no document ids arrived as mask; pass attention_mask = int32 document ids of shape (1, 1, 1, T)")


AttentionInterface.register(NAME, _hf_attention)
AttentionInterface.register(NAME_FAST, functools.partial(_hf_attention, deterministic=False))
AttentionMaskInterface.register(NAME, _refuse_to_build_mask)
AttentionMaskInterface.register(NAME_FAST, _refuse_to_build_mask)

"""The reference: what a training step is, in plain PyTorch. Every other path in MegaTrain must give these bits.

A real transformers model holds the weights; whole-model autograd makes the gradients. Shared with MegaTrain on purpose:
the chunked output loss and the attention operator (numerics settings), and the numpy specification of the optimizer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedConfig

from megatrain.models import attention
from megatrain.models.batch import TokenBatch
from megatrain.models.loss import chunked_backward
from megatrain.models.recorders import GivenBackbone
from megatrain.models.spec_of import model_spec
from megatrain.optim import spec as optim
from megatrain.optim.norm import clip_coefficient, total_norm

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


class Result(NamedTuple):
    losses: list[float]  # per step, over its supervised tokens
    grad_norms: list[float]
    state: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]  # checkpoint name -> (fp32 master w, m, v)


def compute_weight(master: np.ndarray, precision: str) -> Tensor:
    """The weight a step multiplies with: the master itself, or the bf16 it rounds to."""
    if precision == "fp32":
        return torch.from_numpy(master.copy())
    return torch.from_numpy(optim.split(master)[0].view(np.int16).copy()).view(torch.bfloat16)


def add_gradients(
    model: nn.Module, output: nn.Module, batch: TokenBatch, sums: dict[str, Tensor], scale: float, chunk_tokens: int
) -> Tensor:
    """The loss sum of one micro-batch; adds its gradients, times `scale`, in fp32. Only the output layer is special."""
    document_ids = batch.document_ids_T.view(1, 1, 1, -1)
    is_ours = model.config._attn_implementation in (attention.NAME, attention.NAME_FAST)
    y = model.model(
        input_ids=batch.input_ids_T[None],
        position_ids=batch.position_ids_T[None],
        attention_mask=document_ids if is_ours else None,
        use_cache=False,
    ).last_hidden_state

    def logits_of(w: Mapping[str, Tensor], y_chunk: Tensor) -> Tensor:
        return functional_call(output, dict(w), (), {"inputs_embeds": y_chunk, "use_cache": False}).logits

    output_sum = {name: total for name, total in sums.items() if name == OUTPUT}
    output_w = {OUTPUT: model.lm_head.weight}
    loss, dy = chunked_backward(logits_of, output_w, output_sum, y.detach(), batch.labels_T, scale, chunk_tokens)
    inside = [name for name in sums if name != OUTPUT]
    if inside:
        grads = torch.autograd.grad(y, [model.get_parameter(name) for name in inside], dy)
        for name, grad in zip(inside, grads, strict=True):
            sums[name] += grad.float()
    return loss


def train(
    config: PreTrainedConfig,
    masters: Mapping[str, np.ndarray],  # fp32 by checkpoint name; a tied output matrix is the embedding's
    steps: Sequence[Sequence[TokenBatch]],  # the micro-batches of each step
    hypers: Sequence[optim.AdamW],  # one a step
    *,
    precision: str,
    max_grad_norm: float | None,
    chunk_tokens: int,
    attn_implementation: str = attention.NAME,
    freeze: Sequence[str] = (),
    device: str = "cpu",
    prepare: Callable[[nn.Module], None] = lambda _model: None,  # for example: compile the layers
) -> Result:
    """Train for len(steps) steps. A step with a non-finite loss or gradient applies nothing and is not counted."""
    spec = model_spec(config, freeze=freeze)
    tensors = {t.name: t for segment in spec.segments for t in segment.tensors}
    if spec.tied:
        tensors[OUTPUT] = tensors[EMBEDDING]  # two leaves, one master: two gradient sums, added once
    untied = copy.deepcopy(config)
    untied.tie_word_embeddings = False
    settings = {"dtype": compute_weight(np.zeros(1, np.float32), precision).dtype}
    settings["attn_implementation"] = attn_implementation
    model, output = (AutoModelForCausalLM.from_config(untied, **settings).eval().to(device) for _ in range(2))
    output.model = GivenBackbone()
    prepare(model)
    w = {name: np.array(master, dtype=np.float32) for name, master in masters.items()}
    m, v = ({name: np.zeros_like(master) for name, master in w.items()} for _ in range(2))
    losses, norms, applied = [], [], 0
    for micro_batches, hyper in zip(steps, hypers, strict=True):
        sums = {}
        for name, parameter in model.named_parameters():
            parameter.data.copy_(compute_weight(w[tensors[name].name], precision))
            parameter.requires_grad_(tensors[name].trainable)
            if tensors[name].trainable:
                sums[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        denominator = sum(int((batch.labels_T >= 0).sum()) for batch in micro_batches)
        loss = sum(add_gradients(model, output, b, sums, 1.0 / denominator, chunk_tokens) for b in micro_batches)
        if spec.tied and OUTPUT in sums:
            sums[EMBEDDING] += sums.pop(OUTPUT)
        g = {name: total.cpu().numpy() for name, total in sums.items()}
        losses.append(float(loss) / denominator)
        norms.append(total_norm([optim.tensor_sum_squares(g[name]) for name in sorted(g)]))
        if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
            continue
        applied += 1
        scalars = optim.scalars(hyper, applied, clip_coefficient(norms[-1], max_grad_norm))
        for n in g:
            w[n], m[n], v[n] = optim.adamw(w[n], m[n], v[n], g[n], scalars, decay=tensors[n].decay)
    return Result(losses, norms, {name: (w[name], m[name], v[name]) for name in w})

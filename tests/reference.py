"""The reference: what a training step is, in plain PyTorch. Every other path in MegaTrain must give these bits.

A real transformers model holds the weights; whole-model autograd makes the gradients. Shared with MegaTrain on purpose:
the chunked output loss, the attention operator and the recurrent layers that run document by document (numerics
settings), and the numpy specification of the optimizer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from megatrain.models import attention
from megatrain.models.batch import TokenBatch
from megatrain.models.determinism import repeat_bits
from megatrain.models.dice import key_of
from megatrain.models.documents import Packing, run_by_document
from megatrain.models.families import FAMILIES
from megatrain.models.loss import chunked_backward
from megatrain.models.recorders import GivenBackbone
from megatrain.models.spec_of import model_spec
from megatrain.optim import spec as optim
from megatrain.optim.norm import clip_coefficient, total_norm
from tests.reference_parts import RouterLoss, averaged, dice, noise, tables_by_document

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"  # EMBEDDING: of most families


def embedding_name(config: PreTrainedConfig) -> str:
    """The checkpoint name of the embedding table."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)


class Result(NamedTuple):
    losses: list[float]  # per step, over its supervised tokens
    grad_norms: list[float]
    state: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]  # checkpoint name -> (fp32 master w, m, v)
    averages: dict[str, np.ndarray]  # checkpoint name -> running average of the master; none unless asked for


def compute_weight(master: np.ndarray, precision: str) -> Tensor:
    """The weight a step multiplies with: the master itself, or the bf16 it rounds to."""
    if precision == "fp32":
        return torch.from_numpy(master.copy())
    return torch.from_numpy(optim.split(master)[0].view(np.int16).copy()).view(torch.bfloat16)


class Whole(NamedTuple):
    """A real model: all of it, and its output layer alone."""

    model: PreTrainedModel
    output: PreTrainedModel  # takes `inputs_embeds` for the backbone's result
    packing: Packing  # where recurrent layers read the lengths of the documents


def whole(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str, device: str = "cpu") -> Whole:
    """The model of `config` with an output matrix of its own, even if the config ties it. Weights are not set."""
    untied = copy.deepcopy(config)
    untied.tie_word_embeddings = False
    settings = {"dtype": dtype, "attn_implementation": attn_implementation}
    if device == "cuda":
        repeat_bits(attn_implementation != attention.NAME_FAST)
    model, output = (AutoModelForCausalLM.from_config(untied, **settings).eval().to(device) for _ in range(2))
    family = FAMILIES[type(model).__name__]
    packing = run_by_document(model.get_submodule(f"{family.backbone}.{family.layers}"), family)
    tables_by_document(model, packing)
    for parameter in output.parameters():
        parameter.data = parameter.data.to(dtype)
    output.set_submodule(family.backbone, GivenBackbone(output.get_submodule(family.backbone)))
    for name, parameter in list(model.named_parameters()):
        parameter.data = parameter.data.to(dtype)  # every weight is computed with in `dtype`
        parameter.grad_dtype = torch.float32  # several uses of a weight are added in fp32
        if not parameter.requires_grad:  # fixed by the family: not a weight to train
            parent, _, last = name.rpartition(".")
            delattr(model.get_submodule(parent), last)
            model.get_submodule(parent).register_buffer(last, parameter.detach())
    return Whole(model, output, packing)


def set_state(model: nn.Module, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Fill every parameter and every saved buffer. A buffer given in fp32 stays fp32."""
    for name, value in buffers.items():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent).register_buffer(last, value.clone())
    model.load_state_dict(dict(weights) | dict(buffers), strict=True)


def masks_of(config: PreTrainedConfig, batch: TokenBatch) -> Tensor | dict[str, Tensor]:
    """Document ids in the place of a mask; with chunked attention, one id for each chunk of each document too."""
    ids = batch.document_ids_T
    if "chunked_attention" not in (config.to_dict().get("layer_types") or ()):
        return ids.view(1, 1, 1, -1)
    chunks = ids * (ids.numel() + 1) + batch.position_ids_T // config.attention_chunk_size
    return {"full_attention": ids.view(1, 1, 1, -1), "chunked_attention": chunks.int().view(1, 1, 1, -1)}


def lengths_of(batch: TokenBatch) -> tuple[int, ...]:
    """Tokens of every document of a pack."""
    return tuple(torch.unique_consecutive(batch.document_ids_T, return_counts=True)[1].tolist())


def hidden_states(whole: Whole, batch: TokenBatch) -> Tensor:
    """What the backbone gives for a pack: (1, T, D)."""
    model = whole.model
    is_ours = model.config._attn_implementation in (attention.NAME, attention.NAME_FAST)
    whole.packing.lengths_tokens = lengths_of(batch)
    return model.get_submodule(FAMILIES[type(model).__name__].backbone)(
        input_ids=batch.input_ids_T[None],
        position_ids=batch.position_ids_T[None],
        attention_mask=masks_of(model.config, batch) if is_ours else None,
        use_cache=False,
    ).last_hidden_state


def add_gradients(
    whole: Whole,
    batch: TokenBatch,
    sums: dict[str, Tensor],
    scale: float,
    chunk_tokens: int,
    label_smoothing: float = 0.0,
    router_loss: RouterLoss | None = None,
) -> Tensor:
    """The loss sum of one micro-batch; adds its gradients, times `scale`, in fp32. Only the output layer is special."""
    model, output = whole.model, whole.output
    if router_loss is None:
        y, beside = hidden_states(whole, batch), []
    else:
        with router_loss.hear(model) as heard:
            y = hidden_states(whole, batch)
        beside = [router_loss.of(heard, batch)]

    def logits_of(w: Mapping[str, Tensor], y_chunk: Tensor) -> Tensor:
        return functional_call(output, dict(w), (), {"inputs_embeds": y_chunk, "use_cache": False}).logits

    output_w = {name: model.get_parameter(name) for name, _ in output.named_parameters()}
    output_sums = {name: sums[name] for name in sorted(output_w.keys() & sums.keys())}
    loss, dy = chunked_backward(
        logits_of, output_w, output_sums, y.detach(), batch.labels_T, scale, chunk_tokens, label_smoothing
    )
    inside = [name for name in sums if name not in output_w]
    if inside:
        trained = [one for one in beside if one.requires_grad]  # not if every router is frozen
        at = [dy, *(one.new_full((), scale) for one in trained)]
        grads = torch.autograd.grad([y, *trained], [model.get_parameter(name) for name in inside], at)
        for name, grad in zip(inside, grads, strict=True):
            sums[name] += grad.float()
    return sum((one.detach().double() for one in beside), loss)


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
    buffers: Mapping[str, Tensor] = MappingProxyType({}),  # saved buffers by checkpoint name
    label_smoothing: float = 0.0,
    neftune: tuple[float, int] | None = None,  # (alpha, seed)
    dice_seed: int | None = None,  # of dropout; None: there is none
    router_loss: RouterLoss | None = None,
    ema_decay: float | None = None,
) -> Result:
    """Train for len(steps) steps. A step with a non-finite loss or gradient applies nothing and is not counted."""
    spec = model_spec(config, freeze=freeze)
    tensors = {t.name: t for segment in spec.segments for t in segment.tensors}
    embedding = embedding_name(config)
    if spec.tied:
        tensors[OUTPUT] = tensors[embedding]  # two leaves, one master: two gradient sums, added once
    run = whole(config, compute_weight(np.zeros(1, np.float32), precision).dtype, attn_implementation, device)
    model = run.model
    set_state(
        model, {n: p.detach() for n, p in model.named_parameters()}, {n: b.to(device) for n, b in buffers.items()}
    )
    prepare(model)
    w = {name: np.array(master, dtype=np.float32) for name, master in masters.items()}
    m, v = ({name: np.zeros_like(master) for name, master in w.items()} for _ in range(2))
    averages = {} if ema_decay is None else {n: x.copy() for n, x in w.items() if tensors[n].trainable}
    losses, norms, applied = [], [], 0
    for step, (micro_batches, hyper) in enumerate(zip(steps, hypers, strict=True), start=1):
        sums = {}
        for name, parameter in model.named_parameters():
            parameter.data.copy_(compute_weight(w[tensors[name].name], precision))
            parameter.requires_grad_(tensors[name].trainable)
            if tensors[name].trainable:
                sums[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
        denominator = sum(int((batch.labels_T >= 0).sum()) for batch in micro_batches)
        loss = torch.zeros((), dtype=torch.float64)
        for index, b in enumerate(micro_batches):
            key = None if dice_seed is None else key_of(dice_seed, step, index)
            with noise(run.model, b, neftune, step, index), nullcontext() if key is None else dice(run.model, key):
                one = add_gradients(run, b, sums, 1.0 / denominator, chunk_tokens, label_smoothing, router_loss)
            loss = loss + one.cpu()
        if spec.tied and OUTPUT in sums:
            sums[embedding] += sums.pop(OUTPUT)
        g = {name: total.cpu().numpy() for name, total in sums.items()}
        losses.append(float(loss) / denominator)
        norms.append(total_norm([optim.tensor_sum_squares(g[name]) for name in sorted(g)]))
        if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
            continue
        applied += 1
        scalars = optim.scalars(hyper, applied, clip_coefficient(norms[-1], max_grad_norm))
        for n in g:
            w[n], m[n], v[n] = optim.adamw(w[n], m[n], v[n], g[n], scalars, decay=tensors[n].decay)
        averages = {n: averaged(old, w[n], ema_decay) for n, old in averages.items()}
    return Result(losses, norms, {name: (w[name], m[name], v[name]) for name in w}, averages)

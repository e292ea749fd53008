"""The plain PyTorch step that the engine is measured against: everything in HBM, the Hugging Face model as it is.

The same kernels (compiled decoder layers, our attention operator, the chunked head), fp32 gradient sums, fp32 masters,
exact clipping, the framework's fused AdamW. `keep`: without recompute.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PretrainedConfig

from megatrain.models.batch import TokenBatch
from megatrain.models.loss import head_backward
from megatrain.models.template import ModelTemplate
from megatrain.optim import AdamW


class PlainStep:
    """A model, its optimizer, and `step`."""

    def __init__(
        self, config: PretrainedConfig, hyper: AdamW, *, loss_chunk_tokens: int, keep: bool, compiled: bool
    ) -> None:
        device = torch.device("cuda")
        self.chunk_tokens = loss_chunk_tokens
        self.keep = keep
        self.template = ModelTemplate(config, device, torch.bfloat16)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="megatrain")
        self.model.to(device).train()
        self.layers = list(self.model.model.layers)
        self.calls = [torch.compile(layer, dynamic=False) if compiled else layer for layer in self.layers]
        self.params = [p for p in self.model.parameters()]
        self.masters = [p.detach().float() for p in self.params]
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad_dtype = torch.float32
            param.grad = torch.zeros_like(master)
            master.grad = param.grad
        self.head_w = {"norm.weight": self.model.model.norm.weight, "lm_head.weight": self.model.lm_head.weight}
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=hyper.learning_rate, betas=(hyper.beta1, hyper.beta2), eps=hyper.epsilon,
            weight_decay=hyper.weight_decay, fused=True,
        )  # fmt: skip

    def step(self, batches: Sequence[TokenBatch], num_supervised: int) -> None:
        """One optimizer step over `batches`."""
        for batch in batches:
            self._micro_batch(batch, 1.0 / num_supervised)
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)
            torch._foreach_zero_([p.grad for p in self.params])

    def _micro_batch(self, batch: TokenBatch, inv_denominator: float) -> None:
        with torch.no_grad():
            weights = {"embed_tokens.weight": self.model.model.embed_tokens.weight}
            _, calls = self.template.embed(weights, batch)
        h = self.model.model.embed_tokens(batch.input_ids_T[None])
        for layer, call in zip(self.calls, calls, strict=True):
            h = self._layer(layer, h, call)
        leaf = h.detach()
        grads = {name: p.grad for name, p in self.head_w.items()}
        plain = {name: p.detach() for name, p in self.head_w.items()}
        _, dh = head_backward(self.template, plain, grads, leaf, batch.labels_T, inv_denominator, self.chunk_tokens)
        h.backward(dh)

    def _layer(self, layer: torch.nn.Module, h: Tensor, call: object) -> Tensor:
        if self.keep:
            return layer(h, **call.kwargs)
        return checkpoint(layer, h, use_reentrant=False, **call.kwargs)

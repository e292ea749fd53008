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
from megatrain.models.recorders import LayerCalls
from megatrain.models.template import ModelTemplate
from megatrain.optim import AdamW


class PlainStep:
    """A model, its optimizer, and `step`."""

    def __init__(
        self,
        config: PretrainedConfig,
        hyper: AdamW,
        device: torch.device,
        dtype: torch.dtype,
        *,
        loss_chunk_tokens: int,
        keep: bool,
        compiled: bool,
    ) -> None:
        self.chunk_tokens = loss_chunk_tokens
        self.keep = keep
        self.template = ModelTemplate(config, device, dtype)
        if compiled:
            self.template.compile_blocks()
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="megatrain")
        self.layers = [dict(layer.named_parameters()) for layer in self.model.model.layers]
        self.params = list(self.model.parameters())
        # fp32: the parameter is its own master
        self.masters = [p.detach().float() for p in self.params] if dtype == torch.bfloat16 else self.params
        self.sums: dict[Tensor, Tensor] = {}
        self._hooks = []
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = self.sums[param] = torch.zeros_like(master)
            if master is not param:
                self._hooks.append(param.register_post_accumulate_grad_hook(self._add))
        self.head_w = {"norm.weight": self.model.model.norm.weight, "lm_head.weight": self.model.lm_head.weight}
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=hyper.learning_rate, betas=(hyper.beta1, hyper.beta2), eps=hyper.epsilon,
            weight_decay=hyper.weight_decay, fused=True,
        )  # fmt: skip

    def close(self) -> None:
        """Let go of everything: a parameter holds its hook where no collector of garbage looks."""
        for hook in self._hooks:
            hook.remove()

    def _add(self, param: Tensor) -> None:
        """Add a gradient in fp32. Between backward passes a parameter has none: a compiled graph would break at one of
        another dtype than its parameter's."""
        self.sums[param].add_(param.grad)
        param.grad = None

    def step(self, batches: Sequence[TokenBatch], num_supervised: int) -> None:
        """One optimizer step over `batches`."""
        for batch in batches:
            self._micro_batch(batch, 1.0 / num_supervised)
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            if self.masters is not self.params:
                torch._foreach_copy_(self.params, self.masters)
            torch._foreach_zero_(list(self.sums.values()))

    def _micro_batch(self, batch: TokenBatch, inv_denominator: float) -> None:
        with torch.no_grad():
            weights = {"embed_tokens.weight": self.model.model.embed_tokens.weight}
            _, calls = self.template.embed(weights, batch)
        h = self.model.model.embed_tokens(batch.input_ids_T[None])
        for index, weights in enumerate(self.layers):
            h = self._layer(index, weights, h, calls)
        leaf = h.detach()
        grads = {name: self.sums[p] for name, p in self.head_w.items()}
        plain = {name: p.detach() for name, p in self.head_w.items()}
        _, dh = head_backward(self.template, plain, grads, leaf, batch.labels_T, inv_denominator, self.chunk_tokens)
        h.backward(dh)

    def _layer(self, index: int, weights: dict[str, Tensor], h: Tensor, calls: LayerCalls) -> Tensor:
        if self.keep:
            return self.template.apply_block(index, weights, h, calls).h
        return checkpoint(self.template.apply_block, index, weights, h, calls, use_reentrant=False).h

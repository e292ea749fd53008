"""A step by hand over a template: weights pass through two slots that hold NaN between visits. For the tests here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from megatrain.models.batch import TokenBatch
from megatrain.models.grad import Kept, block_backward, block_backward_kept, block_keep, embed_backward
from megatrain.models.layout import Layout, layout_of
from megatrain.models.loss import head_backward
from megatrain.models.template import OUTPUT_WEIGHT, ModelTemplate
from tests.reference import compute_weight


class Homes:
    """The weights of every segment in flat buffers, two slots for the blocks, and fp32 gradient buffers of zeros."""

    def __init__(self, template: ModelTemplate, masters: Mapping[str, np.ndarray], precision: str) -> None:
        self.spec = template.spec
        self.layouts = {s.name: layout_of(s) for s in self.spec.segments}
        self.flats = {n: self._flat(la, masters, precision).to(template.device) for n, la in self.layouts.items()}
        largest = max(layout.num_elements for layout in self.layouts.values())
        on_device = {"device": template.device}
        self.slots = [torch.full((largest,), torch.nan, dtype=template.compute_dtype, **on_device) for _ in range(2)]
        self.grads = {name: torch.zeros(layout.num_elements, **on_device) for name, layout in self.layouts.items()}
        table = self.spec.segments[0].tensors[0]  # the embedding comes first
        assert table.shape == (self.spec.vocab_size, self.spec.hidden_size)
        self.tied_and_trained = self.spec.tied and table.trainable
        self.tied_grad = torch.zeros(self.spec.vocab_size, self.spec.hidden_size, **on_device)

    def _flat(self, layout: Layout, masters: Mapping[str, np.ndarray], precision: str) -> Tensor:
        flat = torch.zeros(layout.num_elements, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
        stop, of = 0, f"{self.spec.architecture}, {layout.segment}"
        for entry in layout.entries:
            assert stop <= entry.offset, f"{of}: {entry.tensor.name} lies over the tensor before it"
            stop = entry.stop
            assert stop <= layout.num_elements, f"{of}: {entry.tensor.name} ends behind its segment"
            flat[entry.offset : stop] = compute_weight(masters[entry.tensor.name], precision).flatten()
        return flat

    def views(self, flat: Tensor, segment: str, trainable_only: bool = False) -> dict[str, Tensor]:
        return {
            e.tensor.local: flat[e.offset : e.stop].view(e.tensor.shape)
            for e in self.layouts[segment].entries
            if e.tensor.trainable or not trainable_only
        }

    def own(self, segment: str) -> dict[str, Tensor]:
        """Weights of EMBED or HEAD."""
        views = self.views(self.flats[segment], segment)
        if segment == "HEAD" and self.spec.tied:
            views[OUTPUT_WEIGHT] = self.own("EMBED")[self.spec.segments[0].tensors[0].local]
        return views

    def fetch(self, segment: str, slot: int) -> dict[str, Tensor]:
        """Weights of a block, copied to `slot`; the other slot is overwritten by NaN."""
        self.slots[1 - slot].fill_(torch.nan)
        self.slots[slot][: self.flats[segment].numel()] = self.flats[segment]
        return self.views(self.slots[slot], segment)

    def grad_views(self, segment: str) -> dict[str, Tensor]:
        views = self.views(self.grads[segment], segment, trainable_only=True)
        if segment == "HEAD" and self.tied_and_trained:
            views[OUTPUT_WEIGHT] = self.tied_grad
        return views

    def gradients(self) -> dict[str, Tensor]:
        """The sums by checkpoint name; the head's sum of a tied embedding under the name of the output matrix."""
        named = {
            e.tensor.name: self.views(self.grads[name], name)[e.tensor.local]
            for name, layout in self.layouts.items()
            for e in layout.entries
            if e.tensor.trainable
        }
        return named | ({OUTPUT_WEIGHT: self.tied_grad} if self.tied_and_trained else {})


def streamed_logits(template: ModelTemplate, homes: Homes, batch: TokenBatch) -> Tensor:
    h, calls = template.embed(homes.own("EMBED"), batch)
    for index, block in enumerate(template.spec.blocks):
        h = template.block(index, homes.fetch(block.name, index % 2), h, calls)
    return template.logits(homes.own("HEAD"), template.tail(homes.own("HEAD"), h))


def streamed_step(
    template: ModelTemplate, homes: Homes, batches: Sequence[TokenBatch], scale: float, chunk_tokens: int, keep: bool
) -> float:
    """The loss sum; gradients land in `homes`. Layer-major: every micro-batch visits a layer before the next layer."""
    range_m, blocks = range(len(batches)), list(enumerate(template.spec.blocks))
    h, calls = map(list, zip(*(template.embed(homes.own("EMBED"), b) for b in batches), strict=True))
    stack: dict[tuple[int, int], Tensor | Kept] = {}
    for index, block in blocks:
        w = homes.fetch(block.name, index % 2)
        for m in range_m:
            stack[index, m] = block_keep(template, index, w, h[m], calls[m])[1] if keep else h[m]
            h[m] = template.block(index, w, h[m], calls[m])
    loss, head, head_grads = 0.0, homes.own("HEAD"), homes.grad_views("HEAD")
    for m in range_m:
        part, h[m] = head_backward(template, head, head_grads, h[m], batches[m].labels_T, scale, chunk_tokens)
        loss += float(part)
    for index, block in reversed(blocks):
        w, grads = homes.fetch(block.name, (index + 1) % 2), homes.grad_views(block.name)
        for m in range_m:
            if keep:
                h[m] = block_backward_kept(stack[index, m], w, grads, h[m])
            else:
                h[m] = block_backward(template, index, w, grads, stack[index, m], calls[m], h[m])
    for m in range_m:
        embed_backward(template, homes.own("EMBED"), homes.grad_views("EMBED"), batches[m], h[m])
    return loss

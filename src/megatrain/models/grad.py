"""Gradients of the template's pieces: each is ADDED in fp32 into a view of a gradient slot.

A bf16 leaf whose `grad` is an fp32 view makes autograd add in place, bit-equal to `grad_view += gradient.float()` and
without a second copy of the gradients. The leaf learns of `grad` only between forward and backward, so that every
forward of a layer looks alike to the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from megatrain.models.attention import Attended
from megatrain.models.batch import TokenBatch
from megatrain.models.layout import embedding_of
from megatrain.models.lookup import Lookups
from megatrain.models.recorders import LayerCall, LayerCalls
from megatrain.models.template import ModelTemplate, Weights, leaves_of, note

Gradients = Mapping[str, Tensor]  # local name -> fp32 view of a gradient slot; only trainable tensors


def point_gradients(leaves: Mapping[str, Tensor], grads: Gradients) -> list[Tensor]:
    """Make autograd add the gradient of each leaf named in `grads` to its view. Returns these leaves."""
    chosen = []
    for name, view in grads.items():
        leaf = leaves[name]
        leaf.grad_dtype = torch.float32
        leaf.grad = view
        chosen.append(leaf)
    return chosen


def embed_backward(
    template: ModelTemplate, w: Weights, grads: Gradients, batch: TokenBatch, dh: Tensor, key: int | None = None
) -> None:
    """Add EMBED's gradients for `dh`, the loss's gradient at `embed`'s result under the same `key`.

    `grads` empty: nothing to do.
    """
    if not grads:
        return
    leaves, table = leaves_of(w, frozenset(grads)), embedding_of(template.spec).local
    lookups = Lookups(leaves[table])
    with torch.enable_grad(), lookups:
        h, _ = template.embed(leaves, batch, key)
    lookup = lookups.only
    if table not in grads or lookup is None:
        torch.autograd.backward(h, dh, inputs=point_gradients(leaves, grads))
        return
    others = [name for name in grads if name != table]
    found = torch.autograd.grad(h, [lookup.edge, *(leaves[name] for name in others)], dh, allow_unused=True)
    lookup.add_gradient(grads[table], found[0])
    for name, gradient in zip(others, found[1:], strict=True):
        if gradient is not None:
            grads[name].add_(gradient)


def block_backward(
    template: ModelTemplate, index: int, w: Weights, grads: Gradients, h: Tensor, calls: LayerCalls, dh: Tensor,
    attended: Attended | None = None,
) -> Tensor:  # fmt: skip
    """Recompute block `index` from its input `h`, add its gradients, return the gradient at `h`.

    `attended`: what `template.block` left of its attention; the recomputation then does without it.
    """
    with torch.enable_grad():
        leaves = leaves_of(w, template.trainable(template.spec.blocks[index]))
        source = h.detach().requires_grad_()
        out = template.apply_block(index, leaves, source, calls, attended)
    at_edges = _at_edges(calls[index], dh, len(out.sums))
    torch.autograd.backward(out.edges(), at_edges, inputs=[source, *point_gradients(leaves, grads)])
    return source.grad


def _at_edges(call: LayerCall, dh: Tensor, num_routers: int) -> list[Tensor]:
    """The gradients that a layer's backward starts from: at its output, and at the sums of its routers."""
    if num_routers == 0:
        return [dh]
    assert call.tally is not None
    assert call.tally.gradient_E is not None, "the router loss was not settled before the backward"
    return [dh, *[call.tally.gradient_E] * num_routers]


class _WeightRef(NamedTuple):
    """A saved tensor that is a view of a weight, without the weight: where it lies inside it, in elements."""

    name: str
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Rebinding:
    """The saved-tensor hooks of one kept graph. Views of `w` are saved as references and found again in `w_now`."""

    def __init__(self, w: Weights) -> None:
        self._ranges = [
            (view.data_ptr(), view.data_ptr() + view.numel() * view.element_size(), name, view.dtype)
            for name, view in w.items()
        ]
        self.w_now: Weights | None = None

    def pack(self, saved: Tensor) -> Tensor | _WeightRef:
        start = saved.data_ptr()
        for first, stop, name, dtype in self._ranges:
            if first <= start < stop:
                assert saved.dtype == dtype, f"{name} was saved as {saved.dtype} over memory of {dtype}"
                offset = (start - first) // saved.element_size()
                return _WeightRef(name, offset, saved.shape, saved.stride())
        return saved

    def unpack(self, packed: Tensor | _WeightRef) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert self.w_now is not None, f"a kept graph was run backward before its weights were bound: {packed.name}"
        weight = self.w_now[packed.name].detach()
        return weight.as_strided(packed.shape, packed.stride, weight.storage_offset() + packed.offset)


@dataclass
class Kept:
    """A block's forward pass with its graph: activations, no weights. Good for one `block_backward_kept`."""

    edges: list[GradientEdge]  # of the output, and of the routers' sums where they have a loss
    call: LayerCall
    source: Tensor  # the block's input, as a leaf
    leaves: dict[str, Tensor]  # trainable weights as leaves, emptied of their memory
    rebinding: _Rebinding


def block_keep(template: ModelTemplate, index: int, w: Weights, h: Tensor, calls: LayerCalls) -> tuple[Tensor, Kept]:
    """Block `index`'s output and its kept graph. The weights may move or be overwritten before the backward."""
    trainable = template.trainable(template.spec.blocks[index])
    rebinding = _Rebinding(w)
    with torch.enable_grad(), saved_tensors_hooks(rebinding.pack, rebinding.unpack):
        leaves = leaves_of(w, trainable)
        source = h.detach().requires_grad_()
        out = template.apply_block(index, leaves, source, calls)
    for leaf in leaves.values():
        leaf.data = leaf.new_empty(()).expand(leaf.shape)  # the graph holds its leaves: leave them one element each
    kept = {name: leaves[name] for name in leaves if name in trainable}
    note(calls[index], out)
    return out.h.detach(), Kept([*map(get_gradient_edge, out.edges())], calls[index], source, kept, rebinding)


def block_backward_kept(kept: Kept, w_now: Weights, grads: Gradients, dh: Tensor) -> Tensor:
    """Add the gradients of a kept block whose weights, same bits, now lie at `w_now`; return that at its input."""
    kept.rebinding.w_now = w_now
    at_edges = _at_edges(kept.call, dh, len(kept.edges) - 1)
    torch.autograd.backward(kept.edges, at_edges, inputs=[kept.source, *point_gradients(kept.leaves, grads)])
    return kept.source.grad

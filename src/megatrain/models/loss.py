"""The loss over token chunks: logits are never whole. One function for streaming and for the reference.

Cross-entropy summed over labelled tokens, softmax in fp32, the sum in fp64. With label smoothing s a token's loss is
(1 - s) * -log p[label] + s * mean over V of -log p; evaluation has none. Legend: T tokens, C tokens of a chunk,
D hidden size, V vocabulary. Memory: O(C x V). No chunk is skipped, so nothing waits for the device to look at labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatrain.models.cross_entropy import token_losses
from megatrain.models.grad import Gradients, point_gradients
from megatrain.models.template import ModelTemplate, Weights, leaves_of

LogitsOf = Callable[[Weights, Tensor], Tensor]  # (weights, h_1CD) -> logits_1CV


def head_backward(
    template: ModelTemplate,
    w: Weights,
    grads: Gradients,
    h: Tensor,
    labels_T: Tensor,
    inv_denominator: float,
    chunk_tokens: int,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(sum of token losses as fp64 0-d, dL/dh_1TD); adds HEAD's gradients. The gradients carry `inv_denominator`."""
    with torch.enable_grad():
        leaves = leaves_of({name: w[name] for name in template.tail_names}, template.tail_names & grads.keys())
        source = h.detach().requires_grad_()
        y_1TD = template.tail(leaves, source)
    output_w = {name: w[name] for name in template.output_names}
    output_grads = {name: grads[name] for name in sorted(template.output_names & grads.keys())}
    loss, dy = chunked_backward(
        template.logits,
        output_w,
        output_grads,
        y_1TD.detach(),
        labels_T,
        inv_denominator,
        chunk_tokens,
        label_smoothing,
    )
    tail_grads = {name: view for name, view in grads.items() if name in template.tail_names}
    torch.autograd.backward(y_1TD, dy, inputs=[source, *point_gradients(leaves, tail_grads)])
    return loss, source.grad


def chunked_backward(
    logits_of: LogitsOf,
    w: Weights,
    grads: Mapping[str, Tensor],
    y_1TD: Tensor,
    labels_T: Tensor,
    inv_denominator: float,
    chunk_tokens: int,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(sum of token losses, dL/dy_1TD) of the output layer; adds its gradients chunk by chunk, first chunk first.

    The order is the contract: plain autograd over chunks would add the last first, and in the compute dtype.
    """
    loss = torch.zeros((), dtype=torch.float64, device=y_1TD.device)
    scale = torch.full((), inv_denominator, dtype=torch.float64, device=y_1TD.device)
    dy_1TD = torch.empty_like(y_1TD)
    leaves = leaves_of(w, frozenset(grads))
    trained = [leaves[name] for name in grads]

    def backward(chunk: slice) -> None:
        """In a function: what it made is gone before the next chunk, dW above all (1 GB for a Llama 3 8B)."""
        nonlocal loss
        with torch.enable_grad():
            y_1CD = y_1TD[:, chunk].detach().requires_grad_()
            loss_C = token_losses(logits_of(leaves, y_1CD).squeeze(0), labels_T[chunk], label_smoothing)
            chunk_loss = loss_C.double().sum()
        dy_1TD[:, chunk], *dw = torch.autograd.grad(chunk_loss, [y_1CD, *trained], scale)
        for view, gradient in zip(grads.values(), dw, strict=True):
            view.add_(gradient)
        loss += chunk_loss.detach()

    for start in range(0, labels_T.numel(), chunk_tokens):
        backward(slice(start, start + chunk_tokens))
    return loss, dy_1TD


@torch.no_grad()
def head_loss(template: ModelTemplate, w: Weights, h: Tensor, labels_T: Tensor, chunk_tokens: int) -> Tensor:
    """The sum of token losses as fp64 0-d, for evaluation."""
    y_1TD = template.tail(w, h)
    loss = torch.zeros((), dtype=torch.float64, device=h.device)
    for start in range(0, labels_T.numel(), chunk_tokens):
        chunk = slice(start, start + chunk_tokens)
        loss += token_losses(template.logits(w, y_1TD[:, chunk]).squeeze(0), labels_T[chunk], 0.0).double().sum()
    return loss

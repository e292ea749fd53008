"""Floating-point operations of a model, counted from its spec. Torch-free.

A multiply-add counts two. Useful operations are those of the formula: each token is multiplied with the active
parameters, and each query meets the keys it can see. What recurrent layers do beside their matrices is left out.
Padding and recomputation are not useful; `hardware_flops` has them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatrain.models.spec import ModelSpec


def visible_pairs(length_tokens: int, window_tokens: int | None) -> int:
    """(query, key) pairs of causal attention inside one document: token t sees min(t + 1, window) tokens."""
    if window_tokens is None or window_tokens >= length_tokens:
        return length_tokens * (length_tokens + 1) // 2
    return window_tokens * (window_tokens + 1) // 2 + (length_tokens - window_tokens) * window_tokens


def attention_flops(spec: ModelSpec, block: int, document_lengths_tokens: Sequence[int]) -> int:
    """Of one block's forward pass: scores and weighted values, 2 multiply-adds a pair, head and channel."""
    shape = spec.attention[block]
    value_size = shape.head_size if shape.value_size is None else shape.value_size
    pieces = [piece for length in document_lengths_tokens for piece in _chunks(length, shape.chunk_tokens)]
    pairs = sum(visible_pairs(piece, shape.window_tokens) for piece in pieces)
    return 2 * shape.num_heads * (shape.head_size + value_size) * pairs


def _chunks(length_tokens: int, chunk_tokens: int | None) -> list[int]:
    """Lengths of the chunks in which the tokens of a document attend; one without chunks."""
    if chunk_tokens is None:
        return [length_tokens]
    whole, rest = divmod(length_tokens, chunk_tokens)
    return [chunk_tokens] * whole + [rest]


def eval_flops(spec: ModelSpec, document_lengths_tokens: Sequence[int]) -> int:
    """Useful operations of a forward pass over documents of these lengths."""
    matrices = 2 * spec.active_parameters * sum(document_lengths_tokens)
    return matrices + sum(attention_flops(spec, i, document_lengths_tokens) for i in range(len(spec.blocks)))


def train_flops(spec: ModelSpec, document_lengths_tokens: Sequence[int]) -> int:
    """Useful operations of forward and backward: the backward pass counts two forwards (6 per parameter and token)."""
    return 3 * eval_flops(spec, document_lengths_tokens)


def hardware_flops(
    spec: ModelSpec,
    document_lengths_tokens: Sequence[int],
    padding_tokens: int,
    recomputed: Sequence[bool],
    attention_kept: Collection[int] = (),
    backwards: int = 1,
) -> int:
    """Operations really done in a training step: with padding, and with a second forward of the blocks `recomputed`.

    `padding_tokens`: tokens of all padded tails; their attention, inside documents of their own, is left out.
    `attention_kept`: blocks (from 0) whose second forward does not attend. `backwards`: 2 for a step in two passes,
    whose second one computes the forward of everything again.
    """
    assert len(recomputed) == len(spec.blocks), f"{len(recomputed)} flags for {len(spec.blocks)} blocks"
    total = backwards * (train_flops(spec, document_lengths_tokens) + 6 * spec.active_parameters * padding_tokens)
    total -= (backwards - 1) * sum(attention_flops(spec, i, document_lengths_tokens) for i in attention_kept)
    num_tokens = sum(document_lengths_tokens) + padding_tokens
    for index, again in enumerate(recomputed):
        if again:
            total += 2 * block_parameters(spec, index) * num_tokens
            total += 0 if index in attention_kept else attention_flops(spec, index, document_lengths_tokens)
    return total


def block_parameters(spec: ModelSpec, index: int) -> int:
    """Parameters of one block that a token is multiplied with: all of them, of experts those chosen."""
    if spec.active_by_block:
        return spec.active_by_block[index]
    return sum(tensor.num_elements for tensor in spec.blocks[index].tensors)

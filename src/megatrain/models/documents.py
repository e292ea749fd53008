"""Documents of a pack: submodules that carry state along the tokens see one document at a time; chunks as documents.

A recurrent or convolutional mixer run over a whole pack would leak the end of one document into the next. So it runs
once for each document, on that document's tokens alone; everything else of its layer sees the whole pack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from megatrain.errors import ModelError
from megatrain.models.attention_cpu import documents
from megatrain.models.batch import TokenBatch
from megatrain.models.families import Family


@dataclass
class Packing:
    """What the mixers of one model are told about the pack that is coming."""

    lengths_tokens: tuple[int, ...] = ()


def lengths_of(document_ids_T: Tensor) -> tuple[int, ...]:
    """Tokens of every document, in order. Waits for the device."""
    return tuple(d.stop - d.start for d in documents(document_ids_T, document_ids_T.numel()))


def run_by_document(layers: nn.Module, family: Family) -> Packing:
    """Make the mixers of `layers` that the family names run document by document; returns where to tell them which.

    Refused: a model without any mixer of these classes. Its library may call them otherwise, and documents would leak.
    """
    packing = Packing()
    names = family.by_document + family.attends_by_document
    mixers = [module for module in layers.modules() if type(module).__name__ in names]
    if names and not mixers:
        raise ModelError(
            f"{family.architecture} has no {' or '.join(names)} here, so documents of a pack could leak into one "
            "another; use a config with such layers, and a transformers version that names them so"
        )
    for mixer in mixers:
        has_mask = type(mixer).__name__ in family.attends_by_document
        mixer.forward = functools.partial(_each_document, mixer.forward, packing, has_mask)
    return packing


@torch.compiler.disable
def _each_document(mix: Callable[..., Any], packing: Packing, has_mask: bool, *args: Any, **kwargs: Any) -> Any:
    """`mix` of every document, end to end. A recurrent mixer gets no mask: a document has no padding."""
    num_tokens, start, pieces = sum(packing.lengths_tokens), 0, []
    if not has_mask:
        kwargs = kwargs | {name: None for name in kwargs if name == "attention_mask"}
    for length in packing.lengths_tokens:
        cut = functools.partial(_cut, rows=slice(start, start + length), num_tokens=num_tokens)
        pieces.append(mix(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()}))
        start += length
    if isinstance(pieces[0], Tensor):
        return torch.cat(pieces, dim=1)
    return torch.cat([piece[0] for piece in pieces], dim=1), *pieces[0][1:]


def _cut(value: Any, rows: slice, num_tokens: int) -> Any:
    """The rows of one document of whatever has one for every token, at dimension 1; of document ids, at the last."""
    if isinstance(value, Tensor) and value.shape == (1, 1, 1, num_tokens):
        return value[..., rows]
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == num_tokens:
        return value[:, rows]
    if isinstance(value, tuple):
        return tuple(_cut(item, rows, num_tokens) for item in value)
    return value


def chunk_tokens_of(config: PreTrainedConfig) -> int | None:
    """The length of attention's chunks, if the model has layers of chunked attention."""
    values = config.to_dict()
    return values["attention_chunk_size"] if "chunked_attention" in (values.get("layer_types") or ()) else None


def chunk_ids(batch: TokenBatch, chunk_tokens: int) -> Tensor:
    """int32 ids shaped like document ids: another one for each `chunk_tokens` of a document (chunked attention)."""
    return (batch.position_ids_T % chunk_tokens == 0).cumsum(0, dtype=torch.int32)

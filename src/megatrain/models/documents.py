"""Documents of a pack: submodules that carry state along the tokens see one document at a time; chunks as documents.

Rotary tables that depend on the length of what they are for (dynamic, LongRoPE) are made for each document by itself.

A recurrent or convolutional mixer run over a whole pack would leak the end of one document into the next. So it runs
once for each document, on that document's tokens alone; everything else of its layer sees the whole pack.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
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


def tables_by_document(before: nn.Module, config: PreTrainedConfig, packing: Packing) -> bool:
    """Make rotary tables that depend on a length depend on their document's alone; whether the config has such tables.

    Each document gets a module as new: the library's own keeps, for dynamic scaling, the longest length it has seen,
    so that bits would depend on what came before, and on where a run was resumed.
    """
    if not _RESIZED & set(_rope_types(config.to_dict().get("rope_parameters") or {})):
        return False
    rotaries = [module for module in before.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if not rotaries:
        raise ModelError(
            f"{type(config).__name__}: rotary tables that depend on the length of a text are not made before the "
            "layers, so documents of a pack would share them; set rope_parameters to another rope_type"
        )
    for rotary in rotaries:
        rotary.forward = functools.partial(_tables_of_each_document, copy.deepcopy(rotary), packing)
    return True


_RESIZED = {"dynamic", "longrope"}


def _rope_types(parameters: Mapping[str, Any]) -> list[str]:
    """Of every layer type, or of the one kind that there is."""
    by_type = [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]
    return [value["rope_type"] for value in by_type if "rope_type" in value]


def _tables_of_each_document(
    new: nn.Module, packing: Packing, x: Tensor, position_ids: Tensor, *layer_type: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """What copies of the rotary module `new` give for the positions of each document, end to end.

    Models with tables by layer type pass it on, some by its place and some by its name.
    """
    pieces = position_ids.split(packing.lengths_tokens, dim=1)
    tables = [copy.deepcopy(new)(x, piece, *layer_type, **kwargs) for piece in pieces]
    return tuple(torch.cat(parts, dim=1) for parts in zip(*tables, strict=True))


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

"""What the reference adds to a plain step when it is asked to: noise, dropout, router loss, rotary tables, averages.

Written for whole-model autograd, apart from the program's own forms of the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.models.batch import TokenBatch
from megatrain.models.dice import key_of
from megatrain.models.documents import Packing
from megatrain.models.families import FAMILIES
from megatrain.models.neftune import with_noise


def averaged(old: np.ndarray, master: np.ndarray, decay: float) -> np.ndarray:
    """The running average after a step: each fp32 operation on its own."""
    with np.errstate(invalid="ignore"):  # Inf has no average
        way = np.subtract(master, old, dtype=np.float32)
        part = np.multiply(way, np.float32(1.0 - decay), dtype=np.float32)
        return np.add(old, part, dtype=np.float32)


def tables_by_document(model: PreTrainedModel, packing: Packing) -> None:
    """Rotary tables that depend on a length are made, document by document, by a rotary module built for it alone."""
    parameters = model.config.to_dict().get("rope_parameters") or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    if not {"dynamic", "longrope"} & {one.get("rope_type") for one in (parameters, *by_layer_type)}:
        return

    def tables(kind: type[nn.Module], x: Tensor, position_ids: Tensor, *layer_type: str) -> tuple[Tensor, Tensor]:
        start, cos, sin = 0, [], []
        for length in packing.lengths_tokens:
            part = kind(model.config).to(x.device)(x, position_ids[:, start : start + length], *layer_type)
            cos.append(part[0])
            sin.append(part[1])
            start += length
        return torch.cat(cos, dim=1), torch.cat(sin, dim=1)

    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = functools.partial(tables, type(module))


@contextmanager
def noise(
    model: PreTrainedModel, batch: TokenBatch, neftune: tuple[float, int] | None, step: int, index: int
) -> Iterator[None]:
    """While entered, the first layer gets its hidden state with the noise of this micro-batch. (alpha, seed)"""
    if neftune is None:
        yield
        return
    family = FAMILIES[type(model).__name__]
    first = model.get_submodule(f"{family.backbone}.{family.layers}")[0]

    def disturb(_layer: nn.Module, given: tuple[Tensor, ...], words: dict[str, Any]) -> tuple[Any, Any]:
        return (with_noise(given[0], batch, *neftune, step, index), *given[1:]), words

    handle = first.register_forward_pre_hook(disturb, with_kwargs=True)
    yield
    handle.remove()


@contextmanager
def dice(model: PreTrainedModel, key: int) -> Iterator[None]:
    """While entered, the model trains: what comes before the layers, and each layer, draws from its own seed."""
    family = FAMILIES[type(model).__name__]
    backbone = model.get_submodule(family.backbone)
    parts = [backbone, *backbone.get_submodule(family.layers)]
    handles = [
        part.register_forward_pre_hook(lambda _part, _given, number=number: seed_all(key_of(key, number)))
        for number, part in enumerate(parts)
    ]
    model.train()
    yield
    model.eval()
    for handle in handles:
        handle.remove()


def seed_all(key: int) -> None:
    """Seed the default generators; a forward hook that returns nothing changes nothing."""
    torch.manual_seed(key)


class RouterLoss(NamedTuple):
    """The balancing loss as one formula over all layers, for whole-model autograd."""

    coefficient: float
    num_experts: int
    num_chosen: int
    router: str  # class of the routers

    def of(self, logits: Sequence[Tensor], batch: TokenBatch) -> Tensor:
        """Times the supervised tokens; documents without a label do not count."""
        labelled = {int(d) for d, label in zip(batch.document_ids_T, batch.labels_T, strict=True) if label >= 0}
        counted = torch.tensor([float(int(d) in labelled) for d in batch.document_ids_T], device=logits[0].device)
        # On the device: a GPU divides by a number of the host as a product with its inverse, which rounds otherwise.
        rows = (counted.sum() * len(logits)).clamp(min=1.0)
        share, probability = torch.zeros(2, self.num_experts, device=counted.device)
        for layer in logits:
            p = torch.softmax(layer.float(), dim=-1)
            chosen = torch.nn.functional.one_hot(p.topk(self.num_chosen, dim=-1).indices, self.num_experts).sum(1)
            share = share + (chosen * counted[:, None]).sum(0)
            probability = probability + (p * counted[:, None]).sum(0)
        balanced = self.num_experts * torch.sum((share / rows) * (probability / rows))
        return (self.coefficient * (batch.labels_T >= 0).sum()) * balanced

    @contextmanager
    def hear(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """While entered, the list gets the logits of every router that runs."""
        heard: list[Tensor] = []
        routers = [module for module in model.modules() if type(module).__name__ == self.router]

        def note(_router: nn.Module, _given: Any, out: tuple[Any, ...]) -> None:
            wide = [t for t in out if torch.is_tensor(t) and t.dtype.is_floating_point and t.ndim == 2]
            heard.append(next(t for t in wide if t.shape[1] == self.num_experts))

        handles = [router.register_forward_hook(note) for router in routers]
        yield heard
        for handle in handles:
            handle.remove()

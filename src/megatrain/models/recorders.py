"""Stand-ins that make the model's own code run without its layers or without its backbone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from megatrain.errors import ModelError
from megatrain.models.router import Tally


class LayerCall(NamedTuple):
    """What a backbone calls one of its layers with, besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    lengths_tokens: tuple[int, ...] = ()  # of the pack's documents, where a part of the layer needs them
    dice: int | None = None  # what seeds the layer's random numbers; None: it draws none
    tally: Tally | None = None  # of the micro-batch, where routers have a loss


LayerCalls = tuple[LayerCall, ...]  # one per block


@dataclass
class Tape:
    """Shared by the recorders of one backbone: the calls they saw, and what they answer (None: their input)."""

    calls: list[LayerCall] = field(default_factory=list)
    first: Tensor | None = None  # the hidden state that the first layer got
    answer: Tensor | None = None


class Recorder(nn.Module):
    """Stands where a layer stood: notes what it is called with, returns its input or the tape's answer.

    It answers any question about attributes as the layer itself would: some backbones ask their layers for their type.
    """

    def __init__(self, layer: nn.Module, tape: Tape, num_others: int | None = None) -> None:
        super().__init__()
        self._num_others = num_others  # Family.others
        self._stands_for = (layer,)  # in a tuple, so that it is not registered as a submodule
        self._tape = tape

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...]:
        """Refuses calls that carry more than data."""
        for name, value in [*enumerate(args, 1), *kwargs.items()]:
            if not _is_plain(value):
                raise ModelError(
                    f"{type(self._stands_for[0]).__name__} is called with {name!r} of type {type(value).__name__}: "
                    "layers that talk to each other outside the hidden state cannot be streamed"
                )
        if not self._tape.calls:
            self._tape.first = hidden_states
        self._tape.calls.append(LayerCall(args, kwargs))
        out = hidden_states if self._tape.answer is None else self._tape.answer
        return out if self._num_others is None else (out, *[None] * self._num_others)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._stands_for[0], name)


def _is_plain(value: object) -> bool:
    """Data that a layer can only read: no gradient flows through it and no layer can leave something in it."""
    if isinstance(value, Tensor):
        return not value.requires_grad
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


@dataclass
class _Given(ModelOutput):
    """A backbone's result; every field that some output layer asks for."""

    last_hidden_state: Tensor | None = None
    past_key_values: None = None
    cache: None = None
    cache_params: None = None
    hidden_states: None = None
    attentions: None = None
    cross_attentions: None = None
    router_logits: None = None


class GivenBackbone(nn.Module):
    """Stands where the backbone stood: its `inputs_embeds` are taken for the last hidden state.

    It answers any question about attributes as the backbone would: some output layers ask it for a multiplier.
    """

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self._stands_for = (backbone,)

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_: Any) -> _Given:
        return _Given(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._stands_for[0], name)


class Absent(nn.Module):
    """Stands, behind the last layer, where a part of the embedding stood: what it answers reaches nothing."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self._hidden_size = hidden_size

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        return torch.zeros(1, 1, self._hidden_size, device=given.device)

"""Stand-ins that make the model's own code run without its layers or without its backbone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from megatrain.errors import ModelError


class LayerCall(NamedTuple):
    """What a backbone calls one of its layers with, besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


LayerCalls = tuple[LayerCall, ...]  # one per block


@dataclass
class Tape:
    """Shared by the recorders of one backbone: the calls they saw, and what they answer (None: their input)."""

    calls: list[LayerCall] = field(default_factory=list)
    answer: Tensor | None = None


class Recorder(nn.Module):
    """Stands where a layer stood: notes what it is called with, returns its input or the tape's answer.

    It answers any question about attributes as the layer itself would: some backbones ask their layers for their type.
    """

    def __init__(self, layer: nn.Module, tape: Tape) -> None:
        super().__init__()
        self._stands_for = (layer,)  # in a tuple, so that it is not registered as a submodule
        self._tape = tape

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Refuses calls that carry more than data."""
        for name, value in [*enumerate(args, 1), *kwargs.items()]:
            if not _is_plain(value):
                raise ModelError(
                    f"{type(self._stands_for[0]).__name__} is called with {name!r} of type {type(value).__name__}: "
                    "layers that talk to each other outside the hidden state cannot be streamed"
                )
        self._tape.calls.append(LayerCall(args, kwargs))
        return hidden_states if self._tape.answer is None else self._tape.answer

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


class GivenBackbone(nn.Module):
    """Stands where the backbone stood: its `inputs_embeds` are taken for the last hidden state."""

    def forward(self, *, inputs_embeds: Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)

"""Text from a model whose layers are lent: the model's own forward and cache, its layers' weights asked for as it goes.

Everything outside the layers (embedding, final norm, output matrix, masks, rotary tables, the key/value or recurrent
cache) is the model's own code on real weights. Each layer stands on the meta device and is run by `functional_call`
on what `lend(index)` returns at that moment, so the same tokens come out wherever the weights were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig
from transformers.generation.streamers import BaseStreamer

from megatrain.models.meta import meta_model
from megatrain.models.template import Weights

Lend = Callable[[int], Weights]  # block index -> its weights on the device, valid until the next call


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. `temperature` 0: always the likeliest; None: as the model's folder says, else 0."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0


class _BorrowingLayer(nn.Module):
    """Stands where layer `index` stood and runs its code on lent weights; answers for its attributes as it would."""

    def __init__(self, layer: nn.Module, index: int, lend: Lend) -> None:
        super().__init__()
        self._stands_for = (layer,)  # in a tuple, so that its meta parameters are not the model's
        self._index = index
        self._lend = lend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._stands_for[0], dict(self._lend(self._index)), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._stands_for[0], name)


class _Watcher(BaseStreamer):
    """Hands every new token to `on_token` as soon as it is chosen."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self._on_token(int(value.item()))
        self._prompt_seen = True

    def end(self) -> None:
        self._prompt_seen = False


class GenerativeModel:
    """A causal language model that writes. `outer`: EMBED's and HEAD's weights on `device`, by checkpoint name;
    `buffers`: what its layers keep in a checkpoint besides parameters (a router's score correction), likewise.

    `folder`: where a generation_config.json may lie (sampling habits and stop tokens of the model itself).
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        outer: Weights,
        buffers: Mapping[str, Tensor],
        lend: Lend,
        *,
        allow_unproven: bool = False,
    ) -> None:
        # no attention named: transformers then chooses as it would for its own generate(), which gives the same tokens
        model, family = meta_model(config, dtype, None, allow_unproven)
        layers = model.get_submodule(f"{family.backbone}.{family.layers}")
        assert isinstance(layers, nn.ModuleList), family
        for name, value in buffers.items():
            model.get_buffer(name).copy_(value)
        borrowing = nn.ModuleList(_BorrowingLayer(layer, index, lend) for index, layer in enumerate(layers))
        for layer in layers:
            _move_buffers(layer, device)
        model.get_submodule(family.backbone).set_submodule(family.layers, borrowing)
        _move_buffers(model, device)
        assert isinstance(model, GenerationMixin), family.architecture
        self._own_habits = (folder / "generation_config.json").is_file()
        if self._own_habits:
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
        _give_weights(model, outer)
        self._model = model
        self._device = device

    def stop_ids(self, more: Collection[int] = ()) -> list[int]:
        """Tokens that end an answer: those of the model's folder, and `more`."""
        own = self._model.generation_config.eos_token_id
        listed = own if isinstance(own, list) else [] if own is None else [own]
        return sorted({*listed, *more})

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        on_token: Callable[[int], None],
        stop_ids: Sequence[int],
    ) -> None:
        """Continue `prompt`, calling `on_token` for each token as it comes, the stop token included."""
        ids_1T = torch.tensor([list(prompt)], dtype=torch.int64, device=self._device)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(sampling.seed)
            self._model.generate(
                ids_1T,
                attention_mask=torch.ones_like(ids_1T),
                streamer=_Watcher(on_token),
                max_new_tokens=sampling.max_tokens,
                eos_token_id=list(stop_ids) or None,
                use_cache=True,
                pad_token_id=stop_ids[0] if stop_ids else 0,
                **self._choice(sampling),
            )

    def _choice(self, sampling: Sampling) -> dict[str, Any]:
        """Words for transformers' generate. Nothing is filtered that neither the user nor the folder asked for."""
        habits = self._model.generation_config
        temperature = sampling.temperature
        if temperature is None:
            samples = self._own_habits and bool(habits.do_sample)
            temperature = (1.0 if habits.temperature is None else habits.temperature) if samples else 0.0
        if temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        top_p = habits.top_p if sampling.top_p is None and self._own_habits else sampling.top_p
        top_k = habits.top_k if self._own_habits else None
        return {"do_sample": True, "temperature": temperature, "top_p": top_p or 1.0, "top_k": top_k or 0}


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def _give_weights(model: nn.Module, outer: Mapping[str, Tensor]) -> None:
    """Put `outer` in the place of the meta parameters; parameters that were one stay one (a tied output matrix)."""
    given: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in given:
            given[id(parameter)] = nn.Parameter(outer[name], requires_grad=False)
        path, _, local = name.rpartition(".")
        setattr(model.get_submodule(path), local, given[id(parameter)])

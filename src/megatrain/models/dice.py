"""Dropout and router noise that a layer can throw again: the same dice for the same (seed, step, micro-batch, layer).

Layers draw from the framework's default generator. Around each call it is seeded with a hash of those four numbers and
put back afterwards, so recomputing a layer gives the same mask, wherever and whenever it runs. Evaluation has no dice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from megatrain.errors import ModelError

# Settings that roll dice while training; those of heads for other tasks aside.
_DICE = re.compile(r"^(?!classifier|summary|seq_class).*(dropout|pdrop|layerdrop|drop_path|jitter)")
_IN_ATTENTION = re.compile(r"att(entio)?n.*(dropout|pdrop)")
_WHOLE_LAYERS = re.compile(r"layerdrop|drop_path")
_LOW_64 = 0xFFFFFFFFFFFFFFFF


def rolls_dice(settings: Mapping[str, Any]) -> bool:
    """Whether a config's layers draw random numbers while training. Refused: dice that cannot be thrown again."""
    found = False
    for name, value in settings.items():
        if not _DICE.search(name) or not isinstance(value, float | int) or value <= 0:
            continue
        if _IN_ATTENTION.search(name):
            raise ModelError(
                f"the config has {name} {value}, but the attention operator has no dropout; set it to 0.0 in "
                "config.json (dropout elsewhere may stay)"
            )
        if _WHOLE_LAYERS.search(name):
            raise ModelError(f"the config has {name} {value}, which skips whole layers; set it to 0.0 in config.json")
        found = True
    return found


def key_of(*words: int) -> int:
    """64 bits of a few integers, by the steps of splitmix64."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _LOW_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _LOW_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _LOW_64
        state ^= state >> 31
    return state


@contextmanager
def thrown(key: int | None, device: torch.device) -> Iterator[None]:
    """While entered, the default generator of `device` (and the CPU's) draws what belongs to `key`. None: as it is."""
    if key is None:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(key)
        yield

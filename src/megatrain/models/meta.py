"""The model of a config with its parameters on the meta device and its buffers real."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from megatrain.errors import ModelError
from megatrain.models.dice import rolls_dice
from megatrain.models.families import Family, family_of
from megatrain.models.hf_folder import refusals_of_transformers
from megatrain.models.router import balance_of

_MOST_LAYERS = 10_000  # a damaged number must not build layers until memory is full
_MAKERS = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)  # what parameters are made with
_LARGE_BYTES = 1 << 30  # a tensor of as many is a parameter, not a buffer


def architecture_of(config: PreTrainedConfig) -> str:
    """The causal-language-model class of `config`; refuses a config that was saved for another class."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model type {config.model_type!r} has no causal language model in transformers; "
            "choose a decoder-only text model"
        )
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    saved_as = config.architectures or [architecture]
    if architecture not in saved_as:
        raise ModelError(
            f"the config says architectures: {saved_as}, which is not the causal language model {architecture}; "
            "use a checkpoint saved from the causal language model"
        )
    return architecture


def _to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Registration hook: the parameter's meta twin. A meta parameter passes through, so that tied ones stay one."""
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)


class _LargeOnMeta(TorchFunctionMode):
    """Inside, large tensors are born on meta: all experts of a layer are one parameter, which may be larger than RAM.

    Not every tensor: buffers have values (rotary frequencies, embedding scale) that not every family can make anew.
    """

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _MAKERS and kwargs.get("device") is None:
            born = func(*args, **{**kwargs, "device": "meta"})
            if born.nbytes >= _LARGE_BYTES:
                return born
        return func(*args, **kwargs)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, every parameter that a module registers goes to the meta device at once, if it was not born there."""
    handle = register_module_parameter_registration_hook(_to_meta)
    try:
        with _LargeOnMeta():
            yield
    finally:
        handle.remove()


def _fix_to_buffers(model: PreTrainedModel) -> None:
    """Parameters that the family itself does not train (score corrections of routers) become saved buffers.

    Where the family insists on fp32 for a saved buffer, it is fp32 as after `from_pretrained`.
    """
    in_fp32 = model._keep_in_fp32_modules_strict or ()
    for path, module in model.named_modules():
        fixed = {name: p for name, p in module.named_parameters(recurse=False) if not p.requires_grad}
        for name, parameter in fixed.items():
            delattr(module, name)
            module.register_buffer(name, torch.zeros(parameter.shape, dtype=parameter.dtype))
        for name, buffer in list(module.named_buffers(recurse=False)):
            saved = name not in module._non_persistent_buffers_set
            if saved and buffer.is_floating_point() and any(key in f"{path}.{name}" for key in in_fp32):
                setattr(module, name, buffer.float())


def _refuse_settings(config: PreTrainedConfig, model: PreTrainedModel, family: Family, dtype: torch.dtype) -> None:
    """No dice that cannot be thrown again, no look ahead, no loss that would be left out, no buffer without values."""
    settings = config.to_dict()
    large = [f"{name} of {buffer.nbytes >> 20:,} MiB" for name, buffer in model.named_buffers() if buffer.is_meta]
    if large:
        raise ModelError(f"{family.architecture} has too large a buffer, {large[0]}; lower what sizes it in its config")
    if not rolls_dice(settings) and any(isinstance(m, nn.Dropout) and m.p > 0.0 for m in model.modules()):
        raise ModelError(
            f"{family.architecture} has dropout that no setting of its config speaks of; it cannot be trained"
        )
    balance_of(config, family.architecture)
    if settings.get("z_loss_coefficient"):
        raise ModelError(
            f"the config has z_loss_coefficient {settings['z_loss_coefficient']}, a loss on the size of the logits, "
            "which is not supported; set it to 0.0 in config.json"
        )
    if model.config._experts_implementation == "batched_mm":
        raise ModelError("experts_implementation batched_mm gives other bits in every run; use grouped_mm or eager")
    if settings.get("residual_in_fp32") and dtype != torch.float32:
        raise ModelError(
            "the config sets residual_in_fp32, which needs precision fp32; choose that, or set it to false in "
            "config.json"
        )
    if not family.hands_over_window and "sliding_attention" in (settings.get("layer_types") or ()):
        raise ModelError(
            f"the config asks for window layers, but the code of {family.architecture} does not hand its window to the "
            "attention operator; set use_sliding_window to false in config.json"
        )
    if settings.get("use_bidirectional_attention"):
        raise ModelError("the config sets use_bidirectional_attention, which is not supported; set it to false")


def _refuse_number_of_layers(config: PreTrainedConfig) -> None:
    name = "num_hidden_layers"
    count = config.to_dict().get(config.attribute_map.get(name, name))
    if isinstance(count, int) and not 1 <= count <= _MOST_LAYERS:
        raise ModelError(
            f"the config has {name} {count}, a model has 1 to {_MOST_LAYERS:,} layers; fetch config.json again"
        )


def meta_model(
    config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str | None, allow_unproven: bool
) -> tuple[PreTrainedModel, Family]:
    """The model of `config` in eval mode: parameters on meta in `dtype`, buffers on the CPU with their real values.

    Buffers have the value and dtype of a model really made with `from_config(config, dtype=dtype)`. `config` is not
    changed. Refused: unproven architectures (unless allowed), settings that cannot be honoured, other layouts.
    """
    family = family_of(architecture_of(config), allow_unproven)
    _refuse_number_of_layers(config)
    config = copy.deepcopy(config)
    config.use_cache = False
    refusals = refusals_of_transformers(
        f"transformers cannot build {family.architecture} as the config says", "fetch the model's config.json again"
    )
    with refusals, _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=False
        )
    _refuse_settings(config, model, family, dtype)
    model.config.output_router_logits = False  # `router` listens for itself; the backbone need not gather them
    _fix_to_buffers(model)
    modules = dict(model.named_modules())
    for path in (family.backbone, *(f"{family.backbone}.{part}" for part in (family.layers, *family.final))):
        if path not in modules:
            raise ModelError(f"{family.architecture} has no submodule {path!r}; this architecture cannot be streamed")
    return model.eval(), family

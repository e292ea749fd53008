"""model_spec: a transformers config -> ModelSpec. Parameters are classified by where they are in the model's tree."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.errors import ConfigError, ModelError
from megatrain.models.families import Family
from megatrain.models.meta import meta_model
from megatrain.models.router import NUM_CHOSEN, NUM_EXPERTS, first_setting
from megatrain.models.spec import NO_LIMIT, AttentionShape, ModelSpec, SegmentSpec, TensorSpec, Traits
from megatrain.models.spec_traits import attentions_of, traits_of


def model_spec(config: PreTrainedConfig, *, freeze: Sequence[str] = (), allow_unproven: bool = False) -> ModelSpec:
    """The segments EMBED, L000 …, HEAD of the model of `config`, and the sizes around them.

    `freeze`: regular expressions, searched in checkpoint names; a matching tensor is not trained.
    Refused with ModelError: what `meta_model` refuses, and ties other than the output matrix to the embedding.
    """
    model, family = meta_model(config, torch.float32, "eager", allow_unproven)
    return spec_of_model(model, family, freeze)


def spec_of_model(model: PreTrainedModel, family: Family, freeze: Sequence[str]) -> ModelSpec:
    """As model_spec, of a model already built."""
    layers = list(model.get_submodule(f"{family.backbone}.{family.layers}").children())
    tied_name = _tied_name(model, family)
    undecayed = _undecayed(model)
    patterns = [_pattern(text) for text in freeze]
    segments: dict[str, list[TensorSpec]] = {name: [] for name in _segment_names(len(layers))}
    for name, parameter in model.named_parameters():
        if name == tied_name:
            continue
        segment, local = _place(name, family)
        trainable = not any(pattern.search(name) for pattern in patterns)
        published = _published(name, family)
        tensor = TensorSpec(name, local, tuple(parameter.shape), trainable, name not in undecayed, published)
        segments[segment].append(tensor)
    _check_freeze(patterns, [t for tensors in segments.values() for t in tensors])
    values = _values(model.config)
    active = _active_by_segment(values, segments)
    traits = {block_name(index): traits_of(layer, values, family) for index, layer in enumerate(layers)}
    return ModelSpec(
        architecture=family.architecture,
        segments=tuple(
            SegmentSpec(name, _kind(name), tuple(tensors), traits.get(name, Traits()))
            for name, tensors in segments.items()
        ),
        tied=tied_name is not None,
        hidden_size=_size(values, "hidden_size"),
        vocab_size=_size(values, "vocab_size"),
        attention=_attention(values, layers, family),
        active_parameters=sum(active) - (0 if tied_name else _embedding_elements(model)),
        max_positions=values.get("max_position_embeddings") or NO_LIMIT,
        active_by_block=tuple(active[1:-1]),
        embedding_copies=_embedding_copies(values, model, family),
        tail_flows=_tail_flows(model.get_submodule(family.backbone), family, _size(values, "hidden_size")),
        logit_copies=_logit_copies(values, family),
        saved_buffers=_saved_buffers(model, family),
    )


def _embedding_copies(values: Mapping[str, Any], model: PreTrainedModel, family: Family) -> int:
    """A scale multiplies: in the module of the table, by a setting of the config, or as a matter of course."""
    scales = ("embedding_multiplier", "embedding_scale", "mup_enabled", "scale_emb", "scale_embedding")
    is_scaled = type(model.get_input_embeddings()) is not nn.Embedding
    return max(family.embedding_copies, int(is_scaled or _scales(values, scales)))


def _tail_flows(backbone: nn.Module, family: Family, hidden_size: int) -> int:
    """What autograd saves of a token in bf16 of the part behind the layers, beside parameters, in hidden states."""
    if not family.final:
        return 2  # a norm that is no module (NanoChat): its input, in fp32
    seen: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        if saved.numel() >= hidden_size and saved.ndim > 1:
            seen[id(saved)] = saved
        return saved

    h = torch.empty(1, 1, hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with saved_tensors_hooks(pack, lambda packed: packed):
        for path in family.final:
            h = copy.deepcopy(backbone.get_submodule(path)).to(torch.bfloat16)(h)
    return round(sum(t.numel() * t.element_size() for t in seen.values()) / (2 * hidden_size))


def _logit_copies(values: Mapping[str, Any], family: Family) -> int:
    """A soft-cap divides, takes tanh, which is saved, and multiplies; a scale multiplies; a cast to fp32 is one too."""
    if any(values.get(name) for name in ("final_logit_softcapping", "logits_soft_cap")):
        return 3
    scales = ("logit_scale", "logits_scaling", "lm_head_multiplier")
    return max(family.logit_copies, int(_scales(values, scales)))


def _scales(values: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Whether any of these settings is a switch that is on, or a factor other than 1 (which a switch equals)."""
    return any(value is True or value not in (None, False, 1.0) for value in map(values.get, names))


def _values(config: PreTrainedConfig) -> Mapping[str, Any]:
    """The settings of a config, under their common names as well as the family's own."""
    values = config.to_dict()
    return values | {common: values[own] for common, own in config.attribute_map.items() if own in values}


def _size(values: Mapping[str, Any], name: str) -> int:
    size = values.get(name)
    if not isinstance(size, int):
        raise ModelError(f"the config has {name} {size!r}; an integer is needed there to stream the model")
    return size


def block_name(index: int) -> str:
    """The segment name of block `index`."""
    return f"L{index:03d}"


def _segment_names(num_blocks: int) -> list[str]:
    return ["EMBED", *(block_name(i) for i in range(num_blocks)), "HEAD"]


def _kind(segment: str) -> str:
    return {"EMBED": "embed", "HEAD": "head"}.get(segment, "block")


def _place(name: str, family: Family) -> tuple[str, str]:
    """(segment, local name) of a parameter. Local names are relative to the layer, to the backbone, or to the model."""
    prefix = f"{family.backbone}."
    if not name.startswith(prefix):
        return "HEAD", name
    inside = name.removeprefix(prefix)
    if inside.startswith(f"{family.layers}."):
        index, local = inside.removeprefix(f"{family.layers}.").split(".", 1)
        return block_name(int(index)), local
    is_final = any(inside.startswith(f"{part}.") for part in family.final)
    return ("HEAD" if is_final else "EMBED"), inside


def _published(name: str, family: Family) -> str | None:
    """The name of a tensor in published checkpoints, if it is another."""
    other = name
    for ours, theirs in family.renamed:
        other = other.replace(ours, theirs)
    return None if other == name else other


def _saved_buffers(model: PreTrainedModel, family: Family) -> tuple[TensorSpec, ...]:
    """Buffers of the layers that checkpoints hold."""
    path = f"{family.backbone}.{family.layers}."
    saved = model.state_dict().keys()
    return tuple(
        TensorSpec(name, name.removeprefix(path), tuple(buffer.shape), False, False, _published(name, family))
        for name, buffer in model.named_buffers()
        if name in saved and name.startswith(path)
    )


def _tied_name(model: PreTrainedModel, family: Family) -> str | None:
    """The name of the output matrix if it is the embedding itself."""
    owners: dict[int, str] = {}
    tied: list[tuple[str, str]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in owners:
            tied.append((owners[id(parameter)], name))
        owners.setdefault(id(parameter), name)
    if not tied:
        return None
    (first, second), *others = tied
    if others or model.get_parameter(first) is not model.get_input_embeddings().weight or second != "lm_head.weight":
        raise ModelError(f"{family.architecture} ties {tied}; only lm_head.weight may be tied, to the input embedding")
    return second


def _undecayed(model: PreTrainedModel) -> frozenset[str]:
    """Names of the tensors that weight decay leaves alone: norms, biases, decays, every tensor with one dimension."""
    norms = [name for name, module in model.named_modules() if "norm" in type(module).__name__.lower()]
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or name.endswith(("bias", "A_log")) or any(name.startswith(f"{norm}.") for norm in norms)
    )


def _active_by_segment(values: Mapping[str, Any], segments: Mapping[str, Sequence[TensorSpec]]) -> list[int]:
    """Parameters that a token is multiplied with, of each segment: of the experts those chosen."""
    num_experts, chosen = first_setting(values, NUM_EXPERTS), first_setting(values, NUM_CHOSEN)
    totals = []
    for index, tensors in enumerate(segments.values(), -1):  # EMBED comes first
        totals.append(sum(t.num_elements for t in tensors))
        for tensor in tensors:
            if num_experts and _is_of_experts(
                tensor, (num_experts, num_experts + (values.get("zero_expert_num") or 0))
            ):
                count = chosen[index] if isinstance(chosen, list) else chosen
                totals[-1] -= tensor.num_elements // tensor.shape[0] * (tensor.shape[0] - count)
    return totals


def _is_of_experts(tensor: TensorSpec, counts: Sequence[int]) -> bool:
    """One slice an expert: matrices in three dimensions, biases in two. Experts that do nothing may have slices too."""
    num_dimensions = 2 if tensor.local.endswith("_bias") else 3
    is_stack = len(tensor.shape) == num_dimensions and tensor.shape[0] in counts
    return is_stack and "conv" not in tensor.local


def _embedding_elements(model: PreTrainedModel) -> int:
    """Elements of tables that are looked up, not multiplied with."""
    return sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding))


def _attention(values: Mapping[str, Any], layers: Sequence[nn.Module], family: Family) -> tuple[AttentionShape, ...]:
    """One shape a block, no heads where a block does not attend. Without layer types a window holds for every block."""
    types = values.get("layer_types") or ["sliding_attention"] * len(layers)
    shapes = []
    for layer, kind in zip(layers, types, strict=True):
        names = [type(module).__name__ for module in attentions_of(layer, family)]
        count = sum(2 if name == "DiffLlamaAttention" else 1 for name in names)  # that one attends twice
        if count == 0:
            shapes.append(AttentionShape(0, 0, None))
            continue
        num_heads = _size(values, "num_attention_heads")
        key_size = values.get("qk_head_dim") or values.get("head_dim") or _size(values, "hidden_size") // num_heads
        window = values.get("sliding_window") if kind in ("sliding_attention", "attention") else None
        chunk = values.get("attention_chunk_size") if kind == "chunked_attention" else None
        value_size = values.get("v_head_dim") or key_size
        calls = None if set(names) & set(family.attends_by_document) else count
        shapes.append(AttentionShape(num_heads * count, key_size, window, value_size, chunk, calls))
    return tuple(shapes)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"freeze: {text!r} is not a regular expression ({error}); correct it") from error


def _check_freeze(patterns: Sequence[re.Pattern[str]], tensors: Sequence[TensorSpec]) -> None:
    for pattern in patterns:
        if not any(pattern.search(t.name) for t in tensors):
            raise ConfigError(f"freeze: {pattern.pattern!r} matches no parameter; names look like {tensors[-1].name!r}")
    if not any(t.trainable for t in tensors):
        raise ConfigError(f"freeze: {[p.pattern for p in patterns]} freezes every parameter; leave some to train")

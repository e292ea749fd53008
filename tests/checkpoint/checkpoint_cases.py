"""Tiny models, stores and folders shared by this folder's tests."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig

from megatrain.models.layout import layout_of
from megatrain.models.spec import AttentionShape, ModelSpec, SegmentSpec, TensorSpec
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.store import SegmentStore
from megatrain.store.store import Precision

CPU = torch.device("cpu")
HIDDEN, FFN, VOCAB = 16, 24, 32


def tiny_config(*, tied: bool = False, layers: int = 2) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    )


def tiny_spec(*, tied: bool = False, layers: int = 2, freeze_embed: bool = False) -> ModelSpec:
    """The spec of `tiny_config`, written by hand so that these tests depend on no other room's code."""

    def tensor(name: str, *shape: int, trainable: bool = True) -> TensorSpec:
        return TensorSpec(name, name, shape, trainable, len(shape) > 1)

    def block(index: int) -> SegmentSpec:
        at = f"model.layers.{index}."
        tensors = (
            tensor(f"{at}self_attn.q_proj.weight", HIDDEN, HIDDEN),
            tensor(f"{at}self_attn.k_proj.weight", HIDDEN // 2, HIDDEN),
            tensor(f"{at}self_attn.v_proj.weight", HIDDEN // 2, HIDDEN),
            tensor(f"{at}self_attn.o_proj.weight", HIDDEN, HIDDEN),
            tensor(f"{at}mlp.gate_proj.weight", FFN, HIDDEN),
            tensor(f"{at}mlp.up_proj.weight", FFN, HIDDEN),
            tensor(f"{at}mlp.down_proj.weight", HIDDEN, FFN),
            tensor(f"{at}input_layernorm.weight", HIDDEN),
            tensor(f"{at}post_attention_layernorm.weight", HIDDEN),
        )
        return SegmentSpec(f"L{index:03d}", "block", tensors)

    head = (tensor("model.norm.weight", HIDDEN),) + (() if tied else (tensor("lm_head.weight", VOCAB, HIDDEN),))
    embed = tensor("model.embed_tokens.weight", VOCAB, HIDDEN, trainable=not freeze_embed)
    segments = (
        SegmentSpec("EMBED", "embed", (embed,)),
        *(block(index) for index in range(layers)),
        SegmentSpec("HEAD", "head", head),
    )
    attention = (AttentionShape(2, HIDDEN // 2, None),) * layers
    return ModelSpec("LlamaForCausalLM", segments, tied, HIDDEN, VOCAB, attention, 0, 64)


def make_store(spec: ModelSpec, precision: Precision, *, hbm: bool = False) -> SegmentStore:
    plans = tuple(
        SegmentPlan(
            segment.name,
            segment.kind,
            trainable=any(tensor.trainable for tensor in segment.tensors),
            weights="own",
            grads="own",
            state="hbm" if hbm else "ram",
        )
        for segment in spec.segments
    )
    return SegmentStore([layout_of(s) for s in spec.segments], precision, Plan(plans, spec.tied, 2, 2, 1), CPU)


def fill_random(store: SegmentStore, seed: int) -> None:
    """Random bits that are no NaN or infinity, in every tensor of every kind; padding stays zero."""
    generator = torch.Generator().manual_seed(seed)
    for segment, layout in store.layouts.items():
        for kind in store.kinds(segment):
            flat = store.flat(segment, kind)
            for entry in layout.entries:
                if kind == "w" or entry.tensor.trainable:
                    values = torch.randn(entry.tensor.num_elements, generator=generator)
                    if kind == "lo":
                        values = (values * 8000).clamp(-32768, 32767)
                    flat[entry.offset : entry.stop].copy_(values)


def stores_equal(one: SegmentStore, other: SegmentStore) -> bool:
    """Every bit of w, lo, m, v, padding included."""
    return all(
        torch.equal(one.flat(segment, kind).view(torch.uint8), other.flat(segment, kind).view(torch.uint8))
        for segment in one.layouts
        for kind in one.kinds(segment)
        if kind != "grad"
    )


def tokenizer_folder(path: Path) -> Path:
    """A source folder with odd bytes in its companions and things that must not be copied."""
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).write_text('{\r\n "a":   1}\n')
    (path / "chat_template.jinja").write_bytes("{{ 'é\u2028' }}\r\n".encode())
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates/rag.jinja").write_text("{{ docs }}")
    (path / "modeling_evil.py").write_text("raise SystemExit")
    (path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    return path

"""Bytes of everything a run allocates, from shapes alone.

Legend: T tokens of a micro-batch, D hidden size, V vocabulary.

Exact: homes and slots (they follow the layouts). Estimated: the working memory of kernels, whose formulas stand below
with what they were fitted to. `tests/planner` compares the exact ones with the store and the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatrain.config import RunConfig
from megatrain.errors import PlanError
from megatrain.models.layout import Layout, embedding_of, layout_of
from megatrain.models.spec import ModelSpec, SegmentSpec
from megatrain.schedule.ops import TIED_GRAD
from megatrain.schedule.plan import Plan, SegmentPlan

MIB = 1 << 20
PROGRAM_RAM_BYTES = {"cpu": 550 * MIB, "cuda": 3200 * MIB}  # Python, torch, transformers, tokenizer (CPU: 430 seen)
CONTEXT_HBM_BYTES = 800 * MIB  # CUDA context (527 on an H200) and loaded kernels (up to 263 more)
SAVE_BUFFER_BYTES = 96 * MIB  # pieces of a checkpoint on their way to the disk
SLACK_DISK_BYTES = 16 * MIB  # of a model folder or checkpoint beside its tensors: headers, tokenizer, block rounding
# Saved by autograd ÷ what linear layers take and give, by `compiled`. Seen: eager 1.11 (Llama fp32), 1.23 (Llama bf16),
# 1.61 (Qwen3 bf16); compiled 0.85 (Llama bf16 on an H200).
SAVED_SCALE = {False: 1.6, True: 1.0}
LOGIT_BYTES = {2: 13, 4: 11}  # of one logit in all its forms on a CPU, by compute_bytes (fp32: 9.7 seen)


@dataclass(frozen=True)
class Shapes:
    """What every size depends on."""

    spec: ModelSpec
    layouts: Mapping[str, Layout]
    compute_bytes: int  # of one compute weight: 2 in bf16, 4 in fp32
    micro_batch_tokens: int
    loss_chunk_tokens: int
    compiled: bool
    fused_loss: bool = False  # on a GPU the loss reads logits and writes their gradient, and nothing else

    @cached_property
    def num_parameters(self) -> int:
        """Of the model; counted once, as the search asks often."""
        return self.spec.num_parameters

    @cached_property
    def segment_bytes(self) -> Mapping[str, tuple[int, int, int]]:
        """Segment -> bytes of its weights, its state and its gradient."""
        size, table = self.compute_bytes, {}
        for name, layout in self.layouts.items():
            state = layout.num_trainable * sum(layout.state_bytes(size).values())
            table[name] = layout.num_elements * size, state, layout.num_trainable * 4
        return table

    @cached_property
    def saved_bytes(self) -> Mapping[str, int]:
        """Block -> what autograd saves of it for one micro-batch: inputs and outputs of its linear layers, scaled for
        the elementwise results beside them. Expert weights count for the share of experts a token visits."""
        per_width = self.micro_batch_tokens * self.compute_bytes * SAVED_SCALE[self.compiled]
        share = _expert_share(self.spec)
        return {block.name: int(per_width * _linear_width(block, share)) for block in self.spec.blocks}

    @cached_property
    def attended_bytes(self) -> Mapping[str, int]:
        """Block -> what its attention gives for one micro-batch; of blocks where that can be kept."""
        table = {}
        for index, (block, attention) in enumerate(zip(self.spec.blocks, self.spec.attention, strict=True)):
            if attention.can_be_kept:
                parts = attended_bytes(self.spec, index, self.compute_bytes, self.micro_batch_tokens)
                table[block.name] = sum(parts.values())
        return table


def weights_bytes(shapes: Shapes, segment: str) -> int:
    """A segment's compute weights."""
    return shapes.segment_bytes[segment][0]


def state_bytes(shapes: Shapes, segment: str) -> int:
    """A segment's lo (bf16 only), m, v and whatever else its layout lists."""
    return shapes.segment_bytes[segment][1]


def gradient_bytes(shapes: Shapes, segment: str) -> int:
    """A segment's fp32 gradient sum."""
    return shapes.segment_bytes[segment][2]


def slot_bytes(
    spec: ModelSpec, plan: Plan, layouts: Mapping[str, Layout], compute_bytes: int, micro_batch_tokens: int
) -> dict[str, int]:
    """Name -> bytes of every slot and boundary activation: the table that the engine makes its device arena of."""
    refuse_unkept(spec, plan)
    pool = [layouts[s.name].num_elements for s in plan.blocks if s.weights == "pool"]
    pooled_grads = [layouts[s.name].num_trainable for s in plan.blocks if s.grads == "pool" and s.trainable]
    table = {f"w.{k}": max(pool) * compute_bytes for k in range(plan.weight_slots if pool else 0)}
    table |= {f"g.{k}": max(pooled_grads) * 4 for k in range(plan.grad_slots if pooled_grads else 0)}
    for segment in plan.segments:
        layout = layouts[segment.name]
        if segment.weights == "own" and segment.state != "hbm":
            table[f"w.{segment.name}"] = layout.num_elements * compute_bytes
        if segment.grads == "own" and segment.trainable:
            table[f"g.{segment.name}"] = layout.num_trainable * 4
        if segment.streams_state:
            kinds = layout.state_bytes(compute_bytes)
            table |= {f"s.{segment.name}.{kind}": layout.num_trainable * size for kind, size in kinds.items()}
    if plan.has_tied_grad:
        table[str(TIED_GRAD)] = embedding_of(spec).num_elements * 4
    one_bytes = micro_batch_tokens * spec.hidden_size * compute_bytes
    own_inputs = sorted({*range(len(plan.blocks) + 1)} - {*plan.offloaded})
    for m in range(plan.round_micro_batches):
        table |= {f"act.{i}.{m}": one_bytes for i in own_inputs}
        table |= {f"h.{k}.{m}": one_bytes for k in range(plan.act_slots if plan.offloaded else 0)}
        table[f"dact.{m}"] = one_bytes
        for i, block in enumerate(plan.blocks):
            if block.activations == "keep_attention":
                parts = attended_bytes(spec, i, compute_bytes, micro_batch_tokens)
                table |= {f"attn.{i}.{m}.{part}": num_bytes for part, num_bytes in parts.items()}
    return table


def attended_bytes(spec: ModelSpec, block: int, compute_bytes: int, micro_batch_tokens: int) -> dict[str, int]:
    """Part -> bytes of what the attention of a block gives for one micro-batch."""
    out_elements, lse_elements = spec.attention[block].kept_elements
    return {"out": micro_batch_tokens * out_elements * compute_bytes, "lse": micro_batch_tokens * lse_elements * 4}


def refuse_unkept(spec: ModelSpec, plan: Plan) -> None:
    """PlanError if `plan` keeps the attention of a block that does not attend exactly once."""
    for block, shape in zip(plan.blocks, spec.attention, strict=True):
        if block.activations == "keep_attention" and not shape.can_be_kept:
            how = "more than once for a micro-batch" if shape.num_heads else "not at all, or by other means"
            raise PlanError(
                f"{block.name} has activations 'keep_attention', but a block of {spec.architecture} like this one "
                f"attends {how}; use 'recompute'"
            )


def segment_hbm_bytes(shapes: Shapes, segment: SegmentPlan) -> int:
    """Device bytes that are this segment's alone: homes and own slots."""
    total = 0
    if segment.state == "hbm":
        total += weights_bytes(shapes, segment.name) + state_bytes(shapes, segment.name)
    elif segment.weights == "own":
        total += weights_bytes(shapes, segment.name)
    if segment.grads == "own" and segment.trainable:
        total += gradient_bytes(shapes, segment.name)
    if segment.streams_state:
        total += state_bytes(shapes, segment.name)
    return total


def pool_bytes(shapes: Shapes, plan: Plan) -> tuple[int, int]:
    """(shared weight slots, shared gradient slots); a slot is as large as the largest block that visits it."""
    weights = [weights_bytes(shapes, s.name) for s in plan.blocks if s.weights == "pool"]
    grads = [gradient_bytes(shapes, s.name) for s in plan.blocks if s.grads == "pool" and s.trainable]
    return plan.weight_slots * max(weights, default=0), plan.grad_slots * max(grads, default=0)


def tied_gradient_bytes(shapes: Shapes, plan: Plan) -> int:
    """The head's own sum for a tied embedding."""
    if not plan.has_tied_grad:
        return 0
    return shapes.spec.vocab_size * shapes.spec.hidden_size * 4


def boundary_bytes(shapes: Shapes, plan: Plan) -> int:
    """Inputs of every block and of HEAD, and one gradient of them, for each micro-batch of a round; offloaded ones
    share slots."""
    count = len(plan.blocks) + 2
    if plan.offloaded:
        count += plan.act_slots - len(plan.offloaded)
    return plan.round_micro_batches * count * one_boundary_bytes(shapes)


def kept_attention_bytes(shapes: Shapes, plan: Plan) -> int:
    """What attention gave to blocks that keep it, for each micro-batch of a round."""
    kept = (shapes.attended_bytes[block.name] for block in plan.blocks if block.activations == "keep_attention")
    return plan.round_micro_batches * sum(kept)


def waiting_bytes(shapes: Shapes, plan: Plan) -> int:
    """Inputs of blocks that wait in RAM for the backward pass."""
    return plan.round_micro_batches * len(plan.waiting_in_ram) * one_boundary_bytes(shapes)


def one_boundary_bytes(shapes: Shapes) -> int:
    """A block's input for one micro-batch."""
    return shapes.micro_batch_tokens * shapes.spec.hidden_size * shapes.compute_bytes


def _linear_width(block: SegmentSpec, expert_share: float) -> float:
    """Σ (inputs + outputs) a token has over the block's matrices."""
    dense = sum(sum(t.shape) for t in block.tensors if len(t.shape) == 2 and not t.local.endswith("bias"))
    experts = [t for t in block.tensors if len(t.shape) == 3]
    return dense + sum(t.shape[0] * expert_share * (t.shape[1] + t.shape[2]) for t in experts)


def _expert_share(spec: ModelSpec) -> float:
    """Chosen experts ÷ all experts, from the parameters a token is multiplied with."""
    tensors = [t for s in spec.segments for t in s.tensors]
    experts = sum(t.num_elements for t in tensors if len(t.shape) == 3)
    if not experts:
        return 0.0
    table = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    dense = sum(t.num_elements for t in tensors if len(t.shape) != 3) - table
    return min(1.0, max(0.0, spec.active_parameters - dense) / experts)


def block_working_bytes(shapes: Shapes) -> int:
    """Peak of one block's backward: what it saves, the gradients in flight, and its weights' gradients before they are
    added in fp32."""
    widest = max(shapes.saved_bytes.values())
    flows = 4 * shapes.micro_batch_tokens * shapes.spec.hidden_size * shapes.compute_bytes
    grads = max(shapes.layouts[b.name].num_trainable for b in shapes.spec.blocks) * shapes.compute_bytes
    return widest + flows + grads


def head_working_bytes(shapes: Shapes) -> int:
    """Peak of HEAD: a chunk's logits with their softmax and gradient, dW before it is added, dL/dh.

    On a GPU as measured on an H200: 6 bytes a logit and five boundaries in bf16.
    """
    spec = shapes.spec
    logits = shapes.loss_chunk_tokens * spec.vocab_size * logit_bytes(shapes)
    grad = spec.vocab_size * spec.hidden_size * shapes.compute_bytes
    boundaries = 5 if shapes.fused_loss else 3
    return logits + grad + boundaries * one_boundary_bytes(shapes)


def embedding_working_bytes(shapes: Shapes) -> int:
    """Peak of EMBED's backward: its whole gradient as computed and, if that is not fp32, again in fp32, and dL/dh."""
    embedding = embedding_of(shapes.spec)
    if not embedding.trainable:
        return 0
    copy_bytes = 4 if shapes.compute_bytes < 4 else 0
    return embedding.num_elements * (shapes.compute_bytes + copy_bytes) + one_boundary_bytes(shapes)


def logit_bytes(shapes: Shapes) -> int:
    """Of one logit in all its forms: itself, its copies and their gradients, two at a time; more where the framework's
    cross-entropy widens it."""
    if not shapes.fused_loss:
        return LOGIT_BYTES[shapes.compute_bytes]
    copies = shapes.spec.logit_copies
    return shapes.compute_bytes * (3 + copies + min(copies, 1))


def checkpoint_bytes(shapes: Shapes) -> int:
    """One checkpoint on disk: the model folder and the exact state."""
    tensors_bytes = sum(weights_bytes(shapes, name) + state_bytes(shapes, name) for name in shapes.layouts)
    return tensors_bytes + SLACK_DISK_BYTES


def layouts_of(spec: ModelSpec, config: RunConfig) -> dict[str, Layout]:
    """Segment -> its layout, with every kind of state that the config asks for."""
    extra_state = () if config.ema_decay is None else ("ema",)
    return {segment.name: layout_of(segment, extra_state) for segment in spec.segments}


def shapes_of(spec: ModelSpec, layouts: Mapping[str, Layout], config: RunConfig, device: str) -> Shapes:
    """Shapes of a resolved config on "cpu" or "cuda"."""
    tokens, chunk_tokens = resolved_tokens(config)
    compute_bytes = 2 if config.precision == "bf16" else 4
    return Shapes(spec, layouts, compute_bytes, tokens, chunk_tokens, bool(config.compile), device == "cuda")


def resolved_tokens(config: RunConfig) -> tuple[int, int]:
    """(micro_batch_tokens, loss_chunk_tokens) of a resolved config."""
    assert config.micro_batch_tokens is not None, "resolve the config first"
    assert config.loss_chunk_tokens is not None, "resolve the config first"
    return config.micro_batch_tokens, config.loss_chunk_tokens

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
from megatrain.models.spec import ModelSpec
from megatrain.planner import saved
from megatrain.schedule.ops import TIED_GRAD
from megatrain.schedule.plan import Plan, SegmentPlan

MIB = 1 << 20
# Python, torch, transformers, tokenizer. Seen: 440 MB of a whole run on a CPU; on an H200, with CUDA and compiled
# kernels, 1707 to 1818 MB of 13 plans (63 more where kernels are compiled anew), and 1890 of one with experts.
PROGRAM_RAM_BYTES = {"cpu": 550 * MIB, "cuda": 1800 * MIB}
EXPERTS_RAM_BYTES = 64 * MIB
# CUDA context (527 MiB on an H200), loaded kernels (up to 263 more), workspaces of matrix products (64)
CONTEXT_HBM_BYTES = 860 * MIB
SAVE_BUFFER_BYTES = 96 * MIB  # pieces of a checkpoint on their way to the disk
SLACK_DISK_BYTES = 16 * MIB  # of a model folder or checkpoint beside its tensors: headers, tokenizer, block rounding
# Saved by an eager block ÷ what linear layers take and give. Seen: 1.11 (Llama fp32), 1.23 (Llama bf16), 1.61 (Qwen3).
EAGER_SAVED = 1.6
LAST_FLOWS = 8  # boundaries, where a compiled backward ends: gradients of q, k, v, their input, the hidden state
POST_NORM_FLOWS = 2  # boundaries, where a norm stands behind the last matrix: 2.00 seen of Gemma 3
TAIL_FLOWS = 14  # boundaries, where the last norm is differentiated, which no compiler sees
# What the pool has no use for: of the largest tensor that comes and goes, at least so much. Seen of ten plans, each in
# a process of its own, on an H200: 0.06 to 0.19 of it, 31 to 204 MB, whether blocks keep what they compute or choose
# experts or neither. (Where workspaces are taken amid a step: up to 2.1 of it.)
UNUSED_SHARE = 0.25
LEAST_UNUSED_BYTES = 128 * MIB
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
        """Block -> what autograd saves of it for one micro-batch; eagerly no less than what a compiler saves."""
        table, share = {}, self.expert_share
        for block, attention in zip(self.spec.blocks, self.spec.attention, strict=True):
            elements = saved.saved_elements(block, attention, self.spec.hidden_size, share)
            lse_bytes = attention.kept_elements[1] * 4
            compiled = int(self.micro_batch_tokens * (elements * self.compute_bytes + lse_bytes))
            eager = 0 if self.compiled else int(EAGER_SAVED * self.linear_bytes[block.name])
            table[block.name] = max(compiled, eager)
        return table

    @cached_property
    def linear_bytes(self) -> Mapping[str, int]:
        """Block -> what its linear layers take and give for one micro-batch; of experts those that are chosen."""
        token_bytes, share = self.micro_batch_tokens * self.compute_bytes, self.expert_share
        return {b.name: int(token_bytes * saved.linear_elements(b, share)) for b in self.spec.blocks}

    @cached_property
    def widest_bytes(self) -> Mapping[str, int]:
        """Block -> the widest of what its matrices take and give for one micro-batch; of experts those chosen."""
        token_bytes, share = self.micro_batch_tokens * self.compute_bytes, self.expert_share
        return {block.name: int(token_bytes * saved.widest_elements(block, share)) for block in self.spec.blocks}

    @cached_property
    def first_bytes(self) -> Mapping[str, int]:
        """Block -> what a compiled backward begins with, beside what is saved: where the last matrix is differentiated,
        the widest gradient and that of the largest matrix; of chosen experts the gradients of what they gave."""
        token_bytes, table = self.micro_batch_tokens * self.compute_bytes, {}
        for block in self.spec.blocks:
            matrix = self.widest_bytes[block.name] + saved.largest_gradient_elements(block) * self.compute_bytes
            experts = int(token_bytes * saved.returned_elements(block, self.expert_share))
            table[block.name] = experts or matrix
        return table

    @cached_property
    def post_normed(self) -> Mapping[str, bool]:
        """Block -> whether norms stand before and behind both of its halves."""
        return {block.name: saved.num_norms(block.tensors, self.spec.hidden_size) >= 4 for block in self.spec.blocks}

    @cached_property
    def block_working_bytes(self) -> int:
        """The most that the backward of any block takes of which nothing was kept."""
        return max(backward_working_bytes(self, block.name, is_kept=False) for block in self.spec.blocks)

    @cached_property
    def transient_bytes(self) -> int:
        """The largest tensor that comes and goes."""
        weight = max(t.num_elements for block in self.spec.blocks for t in block.tensors)
        logits = self.loss_chunk_tokens * self.spec.vocab_size
        largest = max(embedding_of(self.spec).num_elements, logits, weight) * self.compute_bytes
        return max(largest, *self.widest_bytes.values())

    @cached_property
    def call_bytes(self) -> int:
        """What layers are called with beside the hidden state, for a micro-batch: rotary tables, a pair for each kind
        of attention."""
        kinds = {(shape.window_tokens, shape.head_size) for shape in self.spec.attention}
        return self.micro_batch_tokens * sum(2 * head_size for _, head_size in kinds) * self.compute_bytes

    @cached_property
    def checkpoint_bytes(self) -> int:
        """One checkpoint on disk: the model folder and the exact state."""
        return sum(weights + state for weights, state, _ in self.segment_bytes.values()) + SLACK_DISK_BYTES

    @cached_property
    def expert_share(self) -> float:
        """Chosen experts ÷ all experts."""
        return saved.expert_share(self.spec)

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


def step_written_bytes(shapes: Shapes, plan: Plan) -> int:
    """What a step writes to the disk: state, and weights that it changes."""
    states = sum(state_bytes(shapes, s.name) for s in plan.segments if s.state_on_disk)
    return states + sum(weights_bytes(shapes, s.name) for s in plan.segments if s.weights_on_disk and s.trainable)


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
    passing = [layouts[s.name] for s in plan.segments if s.streams_state]
    for kind, size in passing[0].state_bytes(compute_bytes).items() if passing else ():
        largest_bytes = max(layout.num_trainable for layout in passing) * size
        table |= {f"s.{k}.{kind}": largest_bytes for k in range(plan.state_slots)}
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
    return total


def one_boundary_bytes(shapes: Shapes) -> int:
    """A block's input for one micro-batch."""
    return shapes.micro_batch_tokens * shapes.spec.hidden_size * shapes.compute_bytes


def backward_working_bytes(shapes: Shapes, block: str, is_kept: bool) -> int:
    """Peak of a block's backward beyond what was kept of it.

    Compiled, seen to 0.1 %: where its last matrix is differentiated, there is all that is saved (computed again, with
    the block's output, unless it was kept), the widest gradient, and that of the largest matrix before it is added.
    Where tokens are few, it is at the end, where all matrices' gradients are. Eager: all of it at once.
    """
    saved_bytes, flow = shapes.saved_bytes[block], one_boundary_bytes(shapes)
    grads = shapes.layouts[block].num_trainable * shapes.compute_bytes
    if not shapes.compiled:
        return 4 * flow + grads + (0 if is_kept else saved_bytes)
    behind = POST_NORM_FLOWS * flow if shapes.post_normed[block] else 0
    first = shapes.first_bytes[block] + behind + (0 if is_kept else saved_bytes + flow)
    return max(first, grads + LAST_FLOWS * flow - (saved_bytes if is_kept else 0))


def head_working_bytes(shapes: Shapes) -> int:
    """Peak of HEAD: a chunk's logits with their softmax and gradient, dW before it is added, dL/dh.

    On a GPU as seen on an H200 (Llama, Qwen2.5; tied, untied) to 0.1 %, less the dW of the chunk before, which was
    still there: the gradient of the logits in their place, and dW; what the norm saved and two boundaries, and what a
    chunk reads. Where the vocabulary is small, that norm takes more (14.0 boundaries seen of three Llamas with 32K).
    """
    spec = shapes.spec
    logits = shapes.loss_chunk_tokens * spec.vocab_size * logit_bytes(shapes)
    grad = spec.vocab_size * spec.hidden_size * shapes.compute_bytes
    chunk = shapes.loss_chunk_tokens * spec.hidden_size * shapes.compute_bytes
    flows = spec.tail_flows + 2 if shapes.fused_loss else 3
    return max(logits + grad + chunk + flows * one_boundary_bytes(shapes), TAIL_FLOWS * one_boundary_bytes(shapes))


def program_ram_bytes(shapes: Shapes, device: str) -> int:
    """What the program itself takes of RAM on "cpu" or "cuda", before it holds anything of the model."""
    return PROGRAM_RAM_BYTES[device] + (EXPERTS_RAM_BYTES if device == "cuda" and shapes.expert_share else 0)


def unused_pool_bytes(shapes: Shapes) -> int:
    """What the framework's pool holds of the device and has no use for: places that were given away in pieces when
    the tensor they were made for came back."""
    return max(LEAST_UNUSED_BYTES, int(UNUSED_SHARE * shapes.transient_bytes))


def embedding_working_bytes(shapes: Shapes) -> int:
    """Peak of EMBED's backward, over the rows of its own micro-batch: their gradients token by token, summed for each
    row, that in fp32 if it is not, and dL/dh; two more where the rows are scaled. What layers are called with is made
    again beside them."""
    if not embedding_of(shapes.spec).trainable:
        return 0
    copies = (4 + 2 * shapes.spec.embedding_copies) * shapes.compute_bytes + (4 if shapes.compute_bytes < 4 else 0)
    return shapes.micro_batch_tokens * shapes.spec.hidden_size * copies + shapes.call_bytes


def logit_bytes(shapes: Shapes) -> int:
    """Of one logit: where the loss is fused, with its copies and a gradient of theirs; else in all its forms,
    as the framework's cross-entropy widens it."""
    if not shapes.fused_loss:
        return LOGIT_BYTES[shapes.compute_bytes]
    copies = shapes.spec.logit_copies
    return shapes.compute_bytes * (1 + copies + min(copies, 1))


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

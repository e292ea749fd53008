"""ModelSpec: what a model is, as numbers. Torch-free: the planner and the schedule read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SegmentKind = Literal["embed", "block", "head"]
# How state is carried along the tokens: a short convolution; gates of every channel (Griffin); linear attention that
# forgets at a fixed rate (Lightning); the gated delta rule, its gate for every channel (Kimi); a state space (Mamba).
Carrier = Literal["convolution", "gates", "linear attention", "delta rule", "delta rule by channel", "state space"]
NO_LIMIT = 1 << 62  # max_positions of a model that counts no positions


@dataclass(frozen=True)
class TensorSpec:
    """One parameter. `name` is its checkpoint name, `local` its name inside the template it is bound to."""

    name: str  # "model.layers.0.self_attn.q_proj.weight"
    local: str  # "self_attn.q_proj.weight"
    shape: tuple[int, ...]
    trainable: bool
    decay: bool  # weight decay applies (never on norms and biases)
    published: str | None = None  # the name in published checkpoints, where transformers spells it otherwise

    @property
    def num_elements(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Traits:
    """What a block does that its tensors do not show. Paths are module names inside the layer."""

    attends: tuple[str, ...] = ()  # paths of what attends: "self_attn"
    carries: tuple[tuple[str, Carrier], ...] = ()  # paths of what carries state along the tokens otherwise, and how
    bare_norms: tuple[str, ...] = ()  # paths of norms without a weight
    clips: bool = False  # queries, keys and values are clipped
    corrects_choice: bool = False  # a bias corrects which experts are chosen
    runs_all_experts: bool = False  # every expert runs for every token, chosen or not


@dataclass(frozen=True)
class SegmentSpec:
    """The unit that is stored and travels. `name` is "EMBED", "L000" … or "HEAD"."""

    name: str
    kind: SegmentKind
    tensors: tuple[TensorSpec, ...]
    traits: Traits = Traits()


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one block, as the FLOP counter needs it. `window_tokens` None: full causal; no heads: none at all.

    `chunk_tokens`: tokens attend within chunks of so many tokens of their document only.
    `num_calls`: of the attention operator by the block, for one micro-batch; None: it depends on the documents.
    """

    num_heads: int
    head_size: int  # of queries and keys
    window_tokens: int | None
    value_size: int | None = None  # of values; None: as the others
    chunk_tokens: int | None = None
    num_calls: int | None = 1

    @property
    def can_be_kept(self) -> bool:
        """Whether what attention gives has a place of its own between forward and backward."""
        return self.num_heads > 0 and self.num_calls == 1

    @property
    def kept_elements(self) -> tuple[int, int]:
        """What attention gives for a token: elements of its output, in the compute dtype, and of its lse, in fp32."""
        size = self.head_size if self.value_size is None else self.value_size
        return self.num_heads * size, self.num_heads


@dataclass(frozen=True)
class ModelSpec:
    """A model as the planner sees it: segments in travel order (EMBED, L000 …, HEAD), and the sizes around them.

    `tied`: HEAD multiplies by EMBED's embedding; that tensor is then EMBED's alone, and HEAD reads both segments.
    `active_parameters`: parameters a token is multiplied with (all but the embedding table; chosen experts only).
    """

    architecture: str  # "LlamaForCausalLM"
    segments: tuple[SegmentSpec, ...]
    tied: bool
    hidden_size: int
    vocab_size: int
    attention: tuple[AttentionShape, ...]  # one per block
    active_parameters: int
    max_positions: int
    active_by_block: tuple[int, ...] = ()  # as active_parameters, of each block; empty: every block is dense
    embedding_copies: int = 0  # of what was looked up, made before the first layer: scaled
    tail_flows: int = 3  # what the final norm saves of a token, in hidden states: its input in fp32, what it multiplies
    logit_copies: int = 0  # of the logits that stay alive between the output product and the loss: scaled, soft-capped
    saved_buffers: tuple[TensorSpec, ...] = ()  # of the blocks: part of checkpoints, never trained, in no segment

    @property
    def blocks(self) -> tuple[SegmentSpec, ...]:
        return self.segments[1:-1]

    @property
    def num_parameters(self) -> int:
        return sum(t.num_elements for s in self.segments for t in s.tensors)

"""Saved: what autograd keeps of a block's forward for its backward, counted in elements a token. No torch.

D hidden size. Of a compiled block, as seen of a Llama block on an H200 to 0.1 %: everything elementwise is computed
again from what stands at its ends, so what is saved is
- the input of every matrix, once for matrices that read the same (q, k and v; gate and up; router and shared expert);
- the output of every matrix, unless all that becomes of it is to be added to the hidden state;
- what every norm over D reads but the first, which reads the block's own input, and the figures of every row of a norm;
  with one norm alone, attention and MLP stand side by side and read the same;
- q and k once more where they have norms of their own (before the norm, and as attention reads them), or come with v
  from one matrix (and are turned by their positions before attention reads them); k where it is put together of parts;
- where q, k and v are clipped, which of their elements were;
- of attention its lse; its output is the input of a matrix;
- of chosen experts all inputs and outputs, the router's probabilities, and where each choice went;
- of what carries state along the tokens as many values a channel as its kind takes.
Every kind of block is held against the compiler's own choice in tests/planner/test_saved_by_compiler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatrain.models.spec import AttentionShape, Carrier, ModelSpec, SegmentSpec, TensorSpec

# Values saved for each head and for each channel that is mixed, by the compiler's own partition at the usual sizes of
# chunks. In plain PyTorch, which transformers falls back to, a recurrence saves every step or chunk of its scan.
CARRIED: Mapping[Carrier, tuple[float, float]] = {
    "convolution": (0, 7.5), "gates": (0, 20), "linear attention": (0, 18.5), "delta rule": (610, 40),
    "delta rule by channel": (2900, 441), "state space": (0, 76),
}  # fmt: skip
STATE_SAVED = 8  # of every element of a state that each channel has for itself (Mamba; Mamba 2 shares it by heads)
ROUTER_ELEMENTS = 4  # an expert: its probability in fp32, and once more on its way to the choice
CHOICE_ELEMENTS = 18  # a chosen expert: its weight in fp32, and four int64 that say which tokens went where
RETURN_ELEMENTS = 24  # a chosen expert, in the backward: 48 bytes
NORM_ELEMENTS = 2  # a row of a norm: 1 / its root mean square in fp32; of the few with a mean in fp32, half of it


def linear_elements(block: SegmentSpec, expert_share: float) -> float:
    """Σ (inputs + outputs) of the block's matrices."""
    share = _share(block, expert_share)
    experts = sum(t.shape[0] * share * (t.shape[1] + t.shape[2]) for t in _experts(block.tensors))
    return sum(sum(matrix.shape) for matrix in _matrices(block.tensors)) + experts


def saved_elements(block: SegmentSpec, attention: AttentionShape, hidden_size: int, expert_share: float) -> float:
    """What a compiled block saves; of one that attends more than once or by document, what its matrices read and give,
    and what a norm reads."""
    paths = [path for path, _ in block.traits.carries]
    rest = [t for t in block.tensors if not any(_is_within(t, path) for path in paths)]
    saved = sum(
        _carried(kind, [t for t in block.tensors if _is_within(t, path)], hidden_size)
        for path, kind in block.traits.carries
    )
    experts = _experts(rest)
    share = _share(block, expert_share)
    if attention.num_heads and not attention.can_be_kept:
        matrices = sum(sum(matrix.shape) for matrix in _matrices(rest))
        chosen = sum(t.shape[0] * share * (t.shape[1] + t.shape[2]) for t in experts)
        return saved + matrices + chosen + (hidden_size if attention.num_calls else 0)
    saved += _of_modules(block, rest, hidden_size)
    if attention.num_heads:
        saved += sum(_read_by_attention(block, path, attention, hidden_size) for path in block.traits.attends)
    saved += sum(t.shape[0] * share * (t.shape[1] + t.shape[2]) for t in experts)
    groups = {_module(t): t.shape[0] for t in experts}
    saved += hidden_size * sum(1 for t in rest if t.local in [f"{group}.bias" for group in groups])
    return saved + sum(num * (ROUTER_ELEMENTS + share * CHOICE_ELEMENTS) for num in groups.values())


def widest_elements(block: SegmentSpec, expert_share: float) -> float:
    """The widest input or output of a matrix; of experts, those of all that a token is given to."""
    share = _share(block, expert_share)
    dense = max((max(matrix.shape) for matrix in _matrices(block.tensors)), default=0)
    return max([dense, *(t.shape[0] * share * max(t.shape[1:]) for t in _experts(block.tensors))])


def largest_gradient_elements(block: SegmentSpec) -> int:
    """Elements of the largest gradient of a matrix that a backward has in the compute dtype before it is added."""
    return max((matrix.num_elements for matrix in _matrices(block.tensors) if matrix.trainable), default=0)


def returned_elements(block: SegmentSpec, expert_share: float) -> float:
    """What the backward through chosen experts begins with: the gradient of every row that they gave, with its weight
    and without, and where it goes. Seen to 0.1 % of Qwen3 30B-A3B; taken as wide as the widest of their matrices."""
    share = _share(block, expert_share)
    return max([0.0, *(t.shape[0] * share * (2 * max(t.shape[1:]) + RETURN_ELEMENTS) for t in _experts(block.tensors))])


def num_norms(tensors: Sequence[TensorSpec], hidden_size: int) -> int:
    """Norms over the hidden state that are the layer's own, none of a part of it, and have weights."""
    return sum(t.shape == (hidden_size,) and _is_norm(t) and t.local.count(".") == 1 for t in tensors)


def expert_share(spec: ModelSpec) -> float:
    """Chosen experts ÷ all experts, from the parameters a token is multiplied with."""
    tensors = [t for s in spec.segments for t in s.tensors]
    experts = sum(t.num_elements for t in _experts(tensors))
    if not experts:
        return 0.0
    table = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    dense = sum(t.num_elements for t in tensors) - experts - table
    return min(1.0, max(0.0, spec.active_parameters - dense) / experts)


def _share(block: SegmentSpec, expert_share: float) -> float:
    return 1.0 if block.traits.runs_all_experts else expert_share


def _carried(kind: Carrier, tensors: Sequence[TensorSpec], hidden_size: int) -> float:
    """By what is mixed: as wide as the matrix back to the hidden state reads."""
    decays = [t for t in tensors if t.local.endswith("A_log")]
    matrices = _matrices(tensors)
    if any(len(t.shape) == 2 for t in decays):
        return sum(STATE_SAVED * t.num_elements for t in decays) + sum(sum(matrix.shape) for matrix in matrices)
    a_head, a_channel = CARRIED[kind]
    num_channels = max(matrix.shape[1] for matrix in matrices if matrix.shape[0] == hidden_size)
    return a_head * sum(t.num_elements for t in decays) + a_channel * num_channels


def _of_modules(block: SegmentSpec, tensors: Sequence[TensorSpec], hidden_size: int) -> int:
    """Inputs and outputs of all matrices, and what norms over D read."""
    modules: dict[str, list[TensorSpec]] = {}
    for matrix in _matrices(tensors):
        modules.setdefault(_module(matrix), []).append(matrix)
    is_gated = any(matrix.shape[0] == 1 for matrices in modules.values() for matrix in matrices)
    saved, read = 0, set()
    for name, matrices in modules.items():
        top = name.partition(".")[0]
        saved += _of_module(matrices, hidden_size, is_added="." not in name or not is_gated)
        if top in read and any(matrix.shape[1] == hidden_size for matrix in matrices):
            saved -= hidden_size  # the same input as the router's
        read.add(top)
    norms = num_norms(tensors, hidden_size)
    norms += sum(1 for path in block.traits.bare_norms if "." not in path)
    if norms == 1:
        saved -= hidden_size * (len(read) - 1)
    shared = [name for name, (*_, last) in modules.items() if "." in name and last.shape[0] == hidden_size]
    if block.traits.corrects_choice or (shared and not is_gated):  # its router reads in fp32, or may
        saved += hidden_size * (2 if shared else 1)
    inner = sum(1 for t in tensors if t.shape == (hidden_size,) and _is_norm(t) and t.local.startswith("mlp."))
    return saved + (max(0, norms - 1) + inner) * hidden_size + (norms + inner) * NORM_ELEMENTS


def _of_module(matrices: Sequence[TensorSpec], hidden_size: int, is_added: bool) -> int:
    """Inputs and outputs; the last matrix as wide as the hidden state writes to it, or to what `is_added` to it."""
    last = _last(matrices, hidden_size)
    inputs = sum({matrix.shape[1] for matrix in matrices if matrix is not last}) + last.shape[1]
    outputs = sum(matrix.shape[0] for matrix in matrices)
    return inputs + outputs - (hidden_size if is_added and last.shape[0] == hidden_size else 0)


def _read_by_attention(block: SegmentSpec, path: str, attention: AttentionShape, hidden_size: int) -> float:
    """What attention reads beside what the matrices before it give."""
    q = attention.num_heads * attention.head_size
    if any(_is_within(t, path) for t in _experts(block.tensors)):
        return 2 * q  # experts give the queries, and k and v are repeated for each of those chosen
    matrices = [t for t in _matrices(block.tensors) if _is_within(t, path)]
    givers = [matrix for matrix in matrices if matrix is not _last(matrices, hidden_size)]
    widths = [matrix.shape[0] for matrix in givers]
    clipped = sum(widths) / 2 if block.traits.clips else 0.0  # a byte each
    if len(givers) > 2 and any(matrix.shape[1] != hidden_size for matrix in givers):
        return clipped + q  # k of a part that all heads share and one of its own
    norms = {t.local for t in block.tensors if _is_norm(t) and _is_within(t, path)}
    norms |= {name for name in block.traits.bare_norms if name.startswith(f"{path}.")}
    if len(norms) > 1:
        k = min(width for width in widths if width >= attention.head_size) if len(widths) > 2 else (sum(widths) - q) / 2
        gated = attention.kept_elements[0] if len(widths) > 3 or widths[0] == 2 * q else 0
        return clipped + gated + (q + k) * (1 + NORM_ELEMENTS / attention.head_size)
    normed = attention.kept_elements[0] + NORM_ELEMENTS if norms else 0
    return clipped + normed + _turned(matrices, attention)


def _turned(matrices: Sequence[TensorSpec], attention: AttentionShape) -> int:
    """q and k beside the one matrix that gives them and v, and which stays whole for v's sake."""
    if len(matrices) != 2:
        return 0
    reads_values, gives_all = sorted(matrices, key=lambda matrix: matrix.shape[0])
    q, all_three = attention.num_heads * attention.head_size, gives_all.shape[0]
    is_fused = reads_values.shape[1] == attention.kept_elements[0] and q < all_three <= 3 * q
    return q + (all_three - q) // 2 if is_fused else 0


def _last(matrices: Sequence[TensorSpec], hidden_size: int) -> TensorSpec:
    """The matrix back to the hidden state."""
    return next((matrix for matrix in reversed(matrices) if matrix.shape[0] == hidden_size), matrices[-1])


def _matrices(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [t for t in tensors if len(t.shape) == 2 and not t.local.endswith("bias") and not _is_norm(t)]


def _experts(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Stacks of matrices; no convolutions."""
    return [t for t in tensors if len(t.shape) == 3 and "conv" not in t.local]


def _is_norm(tensor: TensorSpec) -> bool:
    """What scales: a vector, or one for each head."""
    if not tensor.local.endswith("weight"):
        return False
    return len(tensor.shape) == 1 or (len(tensor.shape) == 2 and "norm" in tensor.local)


def _is_within(tensor: TensorSpec, path: str) -> bool:
    return tensor.local.startswith(f"{path}.")


def _module(tensor: TensorSpec) -> str:
    """The module that holds the layer of a tensor: "self_attn" of "self_attn.q_proj.weight"."""
    return ".".join(tensor.local.split(".")[:-2])

"""Saved: what autograd keeps of a block's forward for its backward, counted in elements a token. No torch.

D hidden size. Of a compiled block, as seen of a Llama block on an H200 to 0.1 %: everything elementwise is computed
again from what stands at its ends, so what is saved is
- the input of every matrix, once for matrices of one module that read the same (q, k and v; gate and up);
- the output of every matrix, unless all that becomes of it is to be added to the hidden state;
- what every norm over D reads but the first, which reads the block's own input;
- q and k once more where they have norms of their own (before the norm, and as attention reads them), or come with v
  from one matrix (and are turned by their positions before attention reads them);
- of attention its lse; its output is the input of a matrix;
- of chosen experts all inputs and outputs, and the router's probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.models.spec import AttentionShape, ModelSpec, SegmentSpec, TensorSpec

# A recurrent layer in plain PyTorch, which transformers falls back to, saves every step of its scan: 2.2 (Qwen3.5), 6.7
# (Mamba-2) and 10 times (Falcon-Mamba) what its matrices read and give, by the compiler's own partition.
RECURRENT_SAVED = 10
ROUTER_ELEMENTS = 4  # an expert: its probability in fp32, and once more on its way to the choice


def linear_elements(block: SegmentSpec, expert_share: float) -> float:
    """Σ (inputs + outputs) of the block's matrices."""
    experts = sum(t.shape[0] * expert_share * (t.shape[1] + t.shape[2]) for t in _experts(block))
    return sum(sum(matrix.shape) for matrix in _matrices(block)) + experts


def saved_elements(block: SegmentSpec, attention: AttentionShape, hidden_size: int, expert_share: float) -> float:
    """What a compiled block saves; of one that does something else than to attend once, what its matrices read and
    give."""
    experts = _experts(block)
    if attention.num_heads == 0:
        return RECURRENT_SAVED * linear_elements(block, expert_share)
    if not attention.can_be_kept or any(1 in tensor.shape for tensor in experts):  # a convolution
        return linear_elements(block, expert_share)
    modules: dict[str, list[TensorSpec]] = {}
    for matrix in _matrices(block):
        modules.setdefault(_module(matrix), []).append(matrix)
    saved = sum(_of_module(name, matrices, hidden_size) for name, matrices in modules.items())
    norms = sum(1 for t in block.tensors if t.shape == (hidden_size,) and _is_norm(t) and t.local.count(".") == 1)
    saved += max(1, norms - 1) * hidden_size
    normed = {_module(t) for t in block.tensors if _is_norm(t) and t.local.count(".") == 2}
    for name, matrices in modules.items():
        saved += _read_by_attention(matrices) if name in normed else _turned(matrices, attention)
    saved += sum(t.shape[0] * expert_share * (t.shape[1] + t.shape[2]) for t in experts)
    return saved + ROUTER_ELEMENTS * max((t.shape[0] for t in experts), default=0)


def widest_elements(block: SegmentSpec, expert_share: float) -> float:
    """The widest input or output of a matrix; of experts, those of all that a token chooses."""
    dense = max((max(matrix.shape) for matrix in _matrices(block)), default=0)
    return max([dense, *(t.shape[0] * expert_share * max(t.shape[1:]) for t in _experts(block))])


def largest_gradient_elements(block: SegmentSpec) -> int:
    """Elements of the largest gradient that a backward has in the compute dtype before it is added: of a matrix, or of
    all experts."""
    experts = sum(tensor.num_elements for tensor in _experts(block) if tensor.trainable)
    return max([experts, *(matrix.num_elements for matrix in _matrices(block) if matrix.trainable)])


def expert_share(spec: ModelSpec) -> float:
    """Chosen experts ÷ all experts, from the parameters a token is multiplied with."""
    tensors = [t for s in spec.segments for t in s.tensors]
    experts = sum(t.num_elements for t in tensors if len(t.shape) == 3)
    if not experts:
        return 0.0
    table = 0 if spec.tied else spec.vocab_size * spec.hidden_size
    dense = sum(t.num_elements for t in tensors if len(t.shape) != 3) - table
    return min(1.0, max(0.0, spec.active_parameters - dense) / experts)


def _of_module(name: str, matrices: Sequence[TensorSpec], hidden_size: int) -> int:
    """Inputs and outputs; the last matrix of attention or of an MLP as wide as the hidden state writes to it."""
    last = next((matrix for matrix in reversed(matrices) if matrix.shape[0] == hidden_size), matrices[-1])
    inputs = sum({matrix.shape[1] for matrix in matrices if matrix is not last}) + last.shape[1]
    outputs = sum(matrix.shape[0] for matrix in matrices)
    is_added = last.shape[0] == hidden_size and "." not in name
    return inputs + outputs - (hidden_size if is_added else 0)


def _turned(matrices: Sequence[TensorSpec], attention: AttentionShape) -> int:
    """q and k beside the one matrix that gives them and v, and which stays whole for v's sake."""
    if len(matrices) != 2:
        return 0
    reads_values, gives_all = sorted(matrices, key=lambda matrix: matrix.shape[0])
    q, all_three = attention.num_heads * attention.head_size, gives_all.shape[0]
    is_fused = reads_values.shape[1] == attention.kept_elements[0] and q < all_three <= 3 * q
    return q + (all_three - q) // 2 if is_fused else 0


def _read_by_attention(matrices: Sequence[TensorSpec]) -> int:
    """q and k: all that the matrices before the last one give, without v, which is as wide as k."""
    outputs = [matrix.shape[0] for matrix in matrices[:-1]]
    return sum(outputs) - (min(outputs) if len(outputs) > 2 else 0)


def _matrices(block: SegmentSpec) -> list[TensorSpec]:
    return [t for t in block.tensors if len(t.shape) == 2 and not t.local.endswith("bias")]


def _experts(block: SegmentSpec) -> list[TensorSpec]:
    return [t for t in block.tensors if len(t.shape) == 3]


def _is_norm(tensor: TensorSpec) -> bool:
    """A vector that scales."""
    return len(tensor.shape) == 1 and tensor.local.endswith("weight")


def _module(tensor: TensorSpec) -> str:
    """The module that holds the layer of a tensor: "self_attn" of "self_attn.q_proj.weight"."""
    return ".".join(tensor.local.split(".")[:-2])

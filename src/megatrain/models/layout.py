"""Layout: a segment's table, tensor name -> offset. The only owner of offsets in the program. Torch-free.

Offsets count elements, and one table serves every kind of buffer (weights, lo, m, v, gradient). Tensors start at
multiples of 128 elements: 256 bytes in the 2-byte kinds, so every view of every kind is 256-byte aligned.
A layout also lists the kinds of optimizer state there are: those of AdamW, and those that the run asks for besides.
Order: trainable with decay, trainable without, frozen. So the state kinds are a prefix, and an update is at most two
spans.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.models.spec import ModelSpec, SegmentSpec, TensorSpec

ALIGN_ELEMENTS = 128
STATE_BYTES = {"lo": 2, "m": 4, "v": 4, "ema": 4}  # of one parameter; ema: a running average of the fp32 master
ADAMW_STATE = {2: ("lo", "m", "v"), 4: ("m", "v")}  # by bytes of a compute weight: 4 is the master itself


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: elements [offset, offset + num_elements) of its segment's buffers."""

    tensor: TensorSpec
    offset: int

    @property
    def stop(self) -> int:
        return self.offset + self.tensor.num_elements


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) that one optimizer pass treats alike."""

    start: int
    stop: int
    decay: bool


@dataclass(frozen=True)
class Layout:
    """`num_elements` and `num_trainable` are padded to ALIGN_ELEMENTS; padding holds zeros for ever."""

    segment: str
    entries: tuple[Entry, ...]
    num_elements: int
    num_trainable: int  # the trainable prefix: size of every kind of state and of the gradient
    spans: tuple[Span, ...]
    extra_state: tuple[str, ...] = ()  # kinds of state beside AdamW's; the same in every layout of a run

    def __getitem__(self, name: str) -> Entry:
        """The entry of the tensor with checkpoint name `name`."""
        for entry in self.entries:
            if entry.tensor.name == name:
                return entry
        raise KeyError(name)

    def state_bytes(self, compute_bytes: int) -> dict[str, int]:
        """Kind of optimizer state -> its bytes of one parameter, for compute weights of `compute_bytes`."""
        return {kind: STATE_BYTES[kind] for kind in (*ADAMW_STATE[compute_bytes], *self.extra_state)}


def _padded(num_elements: int) -> int:
    return -(-num_elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def embedding_of(spec: ModelSpec) -> TensorSpec:
    """The token embedding: the tensor of EMBED that a tied HEAD multiplies by."""
    for tensor in spec.segments[0].tensors:
        if tensor.shape == (spec.vocab_size, spec.hidden_size):
            return tensor
    raise AssertionError("EMBED holds no (vocabulary, hidden) tensor")


def layout_of(segment: SegmentSpec, extra_state: tuple[str, ...] = ()) -> Layout:
    """The layout of `segment`. Pure: equal specs give equal layouts. `extra_state`: kinds beside AdamW's."""
    order = {(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 2}
    tensors = sorted(segment.tensors, key=lambda t: order[t.trainable, t.decay])
    entries: list[Entry] = []
    spans: list[Span] = []
    offset = num_trainable = 0
    for tensor in tensors:
        entries.append(Entry(tensor, offset))
        start, offset = offset, offset + _padded(tensor.num_elements)
        if not tensor.trainable:
            continue
        num_trainable = offset
        if spans and spans[-1].decay == tensor.decay:
            spans[-1] = Span(spans[-1].start, offset, tensor.decay)
        else:
            spans.append(Span(start, offset, tensor.decay))
    return Layout(segment.name, tuple(entries), offset, num_trainable, tuple(spans), extra_state)

"""The models room.

Holds: ModelSpec and layouts (torch-free), the registry of proven families, templates over the model's own layer code.
Takes -> gives: a transformers config -> ModelSpec, ModelTemplate; weights as views and a micro-batch -> hidden states,
losses, and gradients added in fp32 into the views it is given.
May touch: meta-device modules, their buffers on the compute device, autograd.
Must never: own a parameter, name a tier, a slot or a stream, or decide what is kept or recomputed.

Only the torch-free part is re-exported, so that the planner and the schedule can import this room without torch.
"""

from megatrain.models.families import FAMILIES, Family
from megatrain.models.layout import Entry, Layout, Span, layout_of
from megatrain.models.spec import AttentionShape, ModelSpec, SegmentSpec, TensorSpec

__all__ = [
    "FAMILIES",
    "AttentionShape",
    "Entry",
    "Family",
    "Layout",
    "ModelSpec",
    "SegmentSpec",
    "Span",
    "TensorSpec",
    "layout_of",
]

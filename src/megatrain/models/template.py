"""ModelTemplate: a model's own code, run piece by piece over weights that are lent to it.

Legend: T tokens of a micro-batch, C tokens of a chunk, D hidden size, V vocabulary.
Every hidden state has the shape (1, T, D): one row, documents packed end to end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.errors import ModelError
from megatrain.models import attention
from megatrain.models.attention import Attended, Exchange
from megatrain.models.batch import TokenBatch
from megatrain.models.dice import key_of, rolls_dice, thrown
from megatrain.models.documents import chunk_ids, chunk_tokens_of, lengths_of, run_by_document, tables_by_document
from megatrain.models.families import Family
from megatrain.models.meta import meta_model
from megatrain.models.recorders import Absent, GivenBackbone, LayerCall, LayerCalls, Recorder, Tape
from megatrain.models.router import Balance, RouterSums, balance_of, listen, sums_of, tally_of
from megatrain.models.spec import ModelSpec, SegmentSpec
from megatrain.models.spec_of import attentions_of, spec_of_model

Weights = Mapping[str, Tensor]  # TensorSpec.local -> view of a slot; a tied HEAD also gets "lm_head.weight"
OUTPUT_WEIGHT = "lm_head.weight"
DEFAULT_ATTENTION = attention.NAME
RECOMPILE_LIMIT = 24  # the usual 8, for layers that attend, that keep, that are lent

BlockCall = Callable[..., tuple[Any, tuple[Tensor, ...], tuple[Attended, ...]]]


class BlockOutput(NamedTuple):
    """What a layer gives: its hidden state, its routers' sums where they have a loss, and what its attention gave."""

    h: Tensor
    sums: Sequence[RouterSums]
    attended: Sequence[Attended]  # copies, if they were asked for; none where the spec says that it cannot be kept

    def edges(self) -> list[Tensor]:
        """What a gradient comes back to: the hidden state first."""
        return [self.h, *(one.probability_E for one in self.sums)]


def _call_block(
    layer: nn.Module, w: dict[str, Tensor], h: Tensor, call: LayerCall, heard: list[Tensor],
    exchange: Exchange, lent: Attended | None, keeps: bool,
) -> tuple[Any, tuple[Tensor, ...], tuple[Attended, ...]]:  # fmt: skip
    """The layer's result, the logits that its routers let be heard, and what its attention gave.

    `lent`: what its attention is to give again; None: it attends. `keeps`: what it gave is asked for.
    """
    exchange.lent, exchange.given = lent, [] if keeps else None
    out = functional_call(layer, w, (h, *call.args), call.kwargs)
    logits, attended = tuple(heard), tuple(exchange.given or ())
    exchange.lent = exchange.given = None
    heard.clear()
    return out, logits, attended


def _compiled(name: str) -> BlockCall:
    """`_call_block`, compiled; ModelError if layers called `name` have no few graphs."""
    compiled = torch.compile(_call_block, dynamic=False)

    def call(*args: Any) -> tuple[Any, tuple[Tensor, ...], tuple[Attended, ...]]:
        try:
            return compiled(*args)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise ModelError(
                f"{name} was compiled {RECOMPILE_LIMIT} times and would be again: shapes inside it follow the tokens; "
                "set compile to false"
            ) from error

    return call


class ModelTemplate:
    """The modules of a model on the meta device, with real buffers on `device`. Holds no weights, keeps no state.

    `embed`, `tail` and `logits` are differentiable in the weights that require grad; so is `apply_block`. `block` is
    the forward pass of a layer for its value alone. Not thread-safe: one lane calls it.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        device: torch.device,
        compute_dtype: torch.dtype,
        *,
        freeze: Sequence[str] = (),
        allow_unproven: bool = False,
        attn_implementation: str = DEFAULT_ATTENTION,
    ) -> None:
        model, family = meta_model(config, compute_dtype, attn_implementation, allow_unproven)
        self.spec: ModelSpec = spec_of_model(model, family, freeze)
        self.device = device
        self.compute_dtype = compute_dtype
        self._takes_document_ids = attn_implementation in (attention.NAME, attention.NAME_FAST)
        _move_buffers(model, device)
        backbone = model.get_submodule(family.backbone)
        self._packing = run_by_document(backbone.get_submodule(family.layers), family)
        self._layers: tuple[nn.Module, ...] = tuple(backbone.get_submodule(family.layers))
        self._rolls_dice = rolls_dice(config.to_dict())
        self.balance: Balance | None = balance_of(config, family.architecture)
        self._heard: list[Tensor] = []
        if self.balance is not None:
            layers = nn.ModuleList(self._layers)
            self._heard = listen(layers, family.architecture, self.balance.num_experts)
        backbone.set_submodule(family.layers, nn.ModuleList())
        self._tape = Tape()
        self._others = family.others
        self._before = self._with_recorders(copy.deepcopy(backbone), family.layers)
        for part in family.final:
            self._before.set_submodule(part, nn.Identity())
        has_tables = tables_by_document(self._before, model.config, self._packing)
        self._after = self._with_recorders(backbone, family.layers)
        for name in _own_weights(self._after, family):
            self._after.set_submodule(name, Absent(self.spec.hidden_size))
        model.set_submodule(family.backbone, GivenBackbone(self._after))
        self._output: PreTrainedModel = model
        self._trainable = {s.name: frozenset(t.local for t in s.tensors if t.trainable) for s in self.spec.segments}
        self.tail_names, self.output_names = self._split_head(model)
        self._call_block: BlockCall = _call_block
        self._exchange = Exchange()
        for layer, shape in zip(self._layers, self.spec.attention, strict=True):
            for module in attentions_of(layer, family) if shape.can_be_kept else ():
                attention.connect(module, self._exchange)
        self.saved_buffers: Mapping[str, Tensor] = self._find_buffers(f"{family.backbone}.{family.layers}")
        self._by_document = has_tables or bool(family.by_document + family.attends_by_document)
        self._chunk_tokens: int | None = chunk_tokens_of(model.config)

    def _with_recorders(self, backbone: nn.Module, layers_path: str) -> nn.Module:
        recorders = nn.ModuleList(Recorder(layer, self._tape, self._others) for layer in self._layers)
        backbone.set_submodule(layers_path, recorders)
        return backbone

    def _find_buffers(self, path: str) -> dict[str, Tensor]:
        """Checkpoint name -> the buffer itself, to be filled in place, of the spec's saved buffers."""
        found = {f"{path}.{i}.{name}": b for i, layer in enumerate(self._layers) for name, b in layer.named_buffers()}
        return {tensor.name: found[tensor.name] for tensor in self.spec.saved_buffers}

    def _split_head(self, model: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
        """Local names of HEAD's tensors that `tail` takes, and of those that `logits` takes."""
        head = frozenset(t.local for t in self.spec.segments[-1].tensors)
        output = frozenset(name for name, _ in model.named_parameters())
        return head - output, output

    def trainable(self, segment: SegmentSpec) -> frozenset[str]:
        """Local names of the tensors of `segment` that get a gradient."""
        return self._trainable[segment.name]

    def compile_blocks(self) -> None:
        """Compile the layer call, once per layer class and shape. Changes bits against eager, never between uses.

        FORWARD, recomputation and the kept forward all run the graph that autograd needs, with rounding to the compute
        dtype where eager rounds; otherwise one layer would have two graphs with different results.
        """
        torch._inductor.config.emulate_precision_casts = True
        # Nothing is chosen by a clock (nor is a reduction, where sums are to repeat). Padded products sum in another
        # order; and candidates for a kernel are timed on copies of what it overwrites, in pinned RAM where HBM is
        # short: 1 GiB that no plan knew of (Qwen2.5 7B).
        torch._inductor.config.shape_padding = False
        torch._inductor.config.triton.autotune_pointwise = False
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        self._call_block = _compiled(type(self._layers[0]).__name__)

    def embed(self, w: Weights, batch: TokenBatch, key: int | None = None) -> tuple[Tensor, LayerCalls]:
        """(h_1TD before the first layer, what each layer is to be called with). `w`: EMBED's.

        `key`: in training, the number of this micro-batch of this step, from which dropout is drawn. None: evaluation,
        where there is neither dropout nor router loss.
        """
        self._tape.calls.clear()
        dice = key if self._rolls_dice else None
        self._before.train(dice is not None)
        mask = self._mask_of(batch) if self._takes_document_ids else None
        inputs = {
            "input_ids": batch.input_ids_T.unsqueeze(0),
            "position_ids": batch.position_ids_T.unsqueeze(0),
            "attention_mask": mask,
            "use_cache": False,
        }
        lengths = lengths_of(batch.document_ids_T) if self._by_document else ()
        self._packing.lengths_tokens = lengths
        with thrown(_layer_key(dice, 0), self.device):
            functional_call(self._before, dict(w), (), inputs)
        h_1TD, calls = self._tape.first, tuple(self._tape.calls)
        self._tape.calls.clear()
        self._tape.first = None
        assert h_1TD is not None
        assert len(calls) == len(self._layers), f"{len(calls)} layer calls for {len(self._layers)} layers"
        tally = None if self.balance is None or key is None else tally_of(batch)
        return h_1TD, tuple(
            call._replace(lengths_tokens=lengths, dice=_layer_key(dice, number), tally=tally)
            for number, call in enumerate(calls, 1)
        )

    def _mask_of(self, batch: TokenBatch) -> Tensor | dict[str, Tensor]:
        """Document ids in the place of a mask; for a model of chunked layers, by layer type."""
        ids = batch.document_ids_T.view(1, 1, 1, -1)
        if self._chunk_tokens is None:
            return ids
        chunks = chunk_ids(batch, self._chunk_tokens).view(1, 1, 1, -1)
        return {"full_attention": ids, "chunked_attention": chunks}

    def apply_block(
        self, index: int, w: Weights, h: Tensor, calls: LayerCalls, lent: Attended | None = None, keeps: bool = False
    ) -> BlockOutput:
        """Block `index`'s output, differentiable in `h` and in the `w` that require grad. Tallies nothing.

        `lent`: what its attention gave for the same input, which is then not computed again. `keeps`: the output holds
        a copy of what it gives.
        """
        layer, call = self._layers[index], calls[index]
        self._packing.lengths_tokens = call.lengths_tokens
        if self._rolls_dice:
            layer.train(call.dice is not None)
        with thrown(call.dice, self.device):
            out, logits, attended = self._call_block(
                layer, dict(w), h, LayerCall(call.args, call.kwargs), self._heard, self._exchange, lent, keeps
            )
        if self._others is not None and isinstance(out, tuple) and not any(value is not None for value in out[1:]):
            out = out[0]
        if not isinstance(out, Tensor):
            raise ModelError(f"{type(layer).__name__} returns a {type(out).__name__} instead of one hidden state")
        if out.dtype != h.dtype:
            raise ModelError(
                f"{type(layer).__name__} turns a hidden state of {h.dtype} into {out.dtype}; train with precision fp32"
            )
        if call.tally is None:
            return BlockOutput(out, (), attended)
        assert self.balance is not None
        return BlockOutput(out, sums_of(logits, call.tally.counted_T, self.balance), attended)

    def block(self, index: int, w: Weights, h: Tensor, calls: LayerCalls, attended: Attended | None = None) -> Tensor:
        """Block `index`'s output, and its routers tallied. Runs the same graph as the backward will, and drops it.

        `attended`: where to leave a copy of what its attention gave.
        """
        names = self.trainable(self.spec.blocks[index])
        with torch.enable_grad():
            keeps, source = attended is not None, h.detach().requires_grad_()
            out = self.apply_block(index, leaves_of(w, names), source, calls, keeps=keeps)
        note(calls[index], out)
        if attended is not None:
            (given,) = out.attended
            for place, tensor in zip(attended, given, strict=True):
                place.copy_(tensor)
        return out.h.detach()

    def tail(self, w: Weights, h: Tensor) -> Tensor:
        """What the backbone does after its last layer (the final norm). `w`: HEAD's."""
        inputs = {  # nothing of them reaches the result but their shape
            "inputs_embeds": h.detach(),
            "position_ids": torch.zeros(h.shape[:2], dtype=torch.int64, device=h.device),
            "attention_mask": torch.zeros(1, 1, 1, h.shape[1], dtype=torch.int32, device=h.device),
            "use_cache": False,
        }
        self._tape.answer = h
        try:
            weights = {name: w[name] for name in self.tail_names}
            return functional_call(self._after, weights, (), inputs).last_hidden_state
        finally:
            self._tape.answer = self._tape.first = None
            self._tape.calls.clear()

    def logits(self, w: Weights, h_chunk: Tensor) -> Tensor:
        """logits_1CV of h_chunk_1CD, a piece of the tail's result: the output matrix, logit scale and soft-cap."""
        weights = {name: w[name] for name in self.output_names}
        return functional_call(self._output, weights, (), {"inputs_embeds": h_chunk, "use_cache": False}).logits


def note(call: LayerCall, out: BlockOutput) -> None:
    """In a forward pass: tally what the routers of a layer chose."""
    if call.tally is not None:
        call.tally.add(out.sums)


def _layer_key(key: int | None, number: int) -> int | None:
    """The dice of what comes before the layers (0), or of a layer (from 1)."""
    return None if key is None else key_of(key, number)


def _own_weights(backbone: nn.Module, family: Family) -> list[str]:
    """Parts of the backbone with weights of EMBED: what comes before the first layer."""
    others = (family.layers, *family.final)
    return [n for n, m in backbone.named_children() if n not in others and next(m.parameters(), None) is not None]


def leaves_of(w: Weights, trainable: frozenset[str]) -> dict[str, Tensor]:
    """The views as autograd leaves; only those named in `trainable` require grad."""
    return {name: view.detach().requires_grad_(name in trainable) for name, view in w.items()}


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))

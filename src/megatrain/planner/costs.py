"""Costs: seconds of every op that has its resources to itself, and what it takes of those it shares. No torch.

Legend: T tokens of a micro-batch, D hidden size, V vocabulary.

One table for what is computed (`_WORK`, a row a kind), one for what a place holds (`CONTENT_BYTES`, a row a pool): an
op that moves bytes needs no row of its own, its lane and the places it writes say all. The shares and bytes below were
fitted to traces of an H200 (docs/performance.md); `Rates.scale` corrects them for another machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatrain.errors import ConfigError
from megatrain.hardware.rates import Rates
from megatrain.models.flops import attention_flops, block_parameters
from megatrain.planner import sizes
from megatrain.planner.sizes import Shapes
from megatrain.schedule.ops import Kind, Lane, Op, Place
from megatrain.schedule.simulate import Sharing, Use

LINEAR_SHARE = 0.88  # of the matmul rate: layer-sized products (690 of 785 TFLOP/s)
EXPERT_SHARE = 0.40  # grouped products of chosen experts
HEAD_SHARE = 0.85  # products of a loss chunk with the vocabulary
ATTENTION_BACKWARD = 2.5 / 0.8  # of the forward's seconds: 2.5 times the operations at 0.8 of the rate
# Of the rate that doctor takes of the CPU update, where a GPU does the rest: updates of 22 plans on an H200's host ran
# at 1.00 to 1.24 of it, half of them above 1.11.
UPDATE_SHARE = 1.1
UPDATE_BYTES = 28  # a parameter: reads w lo m v grad, writes w lo m v
EXTRA_UPDATE_BYTES = {"ema": 12}  # a parameter, in a pass of its own: reads w lo ema, writes ema
ADD_BYTES = 12  # a parameter: its gradient in the compute dtype written and read, its fp32 sum read and written
LOOKUP_BYTES = 12  # a value: its row read, the hidden state written, and once more where it is scaled
ADD_ROWS_BYTES = 130  # a value: its gradient read, sorted by row, summed, widened, added to its sum (116 to 142 seen)
LOGIT_TRAFFIC_BYTES = {True: 12, False: 8}  # of one logit, with and without its gradient
UNKNOWN_DISK_Bps = 1e9  # of a disk that could not be measured
CLIP_S = 2e-3  # of gathering the norms and deciding


class Work(NamedTuple):
    """What an op computes."""

    linear_flops: float = 0.0
    expert_flops: float = 0.0
    head_flops: float = 0.0
    attention_s: float = 0.0
    hbm_bytes: float = 0.0
    host_params: float = 0.0
    fixed_s: float = 0.0


class Cost(NamedTuple):
    """Seconds alone, and uses at full speed."""

    seconds: float
    uses: tuple[Use, ...]


@dataclass
class CostModel:
    """Costs of the ops of one run; ConfigError if `rates` scale what is no kind of op.

    `document_tokens`: length of the documents that attention meets.
    """

    shapes: Shapes
    rates: Rates
    document_tokens: int
    on_cpu: bool
    _known: dict[tuple[object, ...], Cost] = field(default_factory=dict)
    _block: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        for name in sorted(self.rates.scale.keys() - set(Kind)):
            raise ConfigError(
                f"rates.scale.{name} of the machine is {self.rates.scale[name]:g}, but no kind of op is called so; "
                f"leave it out, or name one of: {', '.join(Kind)}"
            )
        self._block = {block.name: index for index, block in enumerate(self.shapes.spec.blocks)}

    def seconds(self, op: Op) -> float:
        """Of an op that has every resource to itself."""
        return self.cost(op).seconds

    @property
    def capacity(self) -> Mapping[str, float]:
        """What ops share on this machine, in the units of their uses."""
        rates = self.rates
        return {"dram": rates.dram_Bps, "link": rates.link_both_Bps, "disk": 1.0, "cores": 1.0}

    def cost(self, op: Op) -> Cost:
        """Both, looked up: ops of one kind and segment cost the same at every micro-batch."""
        key = (op.segment, *_alike(op))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._count(op)
        return known

    def _count(self, op: Op) -> Cost:
        scale, segment = self.rates.scale.get(op.kind, 1.0), op.segment
        if op.kind in _WORK:
            work = _WORK[op.kind](self, op, segment)
            seconds = scale * self._work_seconds(work)
            return Cost(seconds, self._work_uses(work, seconds))
        moved_bytes = sum(content_bytes(self.shapes, place, segment) for place in op.writes)
        seconds = scale * (self.rates.op_s + moved_bytes / self._travel_Bps(op))
        return Cost(seconds, self._travel_uses(op, moved_bytes / seconds))

    def _work_seconds(self, work: Work) -> float:
        rates = self.rates
        products = work.linear_flops / LINEAR_SHARE + work.expert_flops / EXPERT_SHARE + work.head_flops / HEAD_SHARE
        return (
            rates.op_s
            + products / rates.matmul_flops_per_s
            + work.attention_s
            + work.hbm_bytes / rates.hbm_Bps
            + work.host_params / (rates.update_params_per_s * (1.0 if self.on_cpu else UPDATE_SHARE))
            + work.fixed_s
        )

    def _work_uses(self, work: Work, seconds: float) -> tuple[Use, ...]:
        cores = (Use("cores", 1.0),) if self.on_cpu else ()
        if work.host_params:
            return (Use("dram", work.host_params * UPDATE_BYTES / seconds, yields=True), *cores)
        return cores

    def _travel_Bps(self, op: Op) -> float:
        rates = self.rates
        if op.lane is Lane.H2D:
            return rates.h2d_Bps
        if op.lane is Lane.D2H:
            return rates.d2h_Bps
        disk_Bps = rates.disk_write_Bps if _to_disk(op) else rates.disk_read_Bps
        return disk_Bps or UNKNOWN_DISK_Bps

    def _travel_uses(self, op: Op, rate_Bps: float) -> tuple[Use, ...]:
        if op.lane in (Lane.H2D, Lane.D2H):
            dram_Bps = 2 * rate_Bps if self.on_cpu else rate_Bps  # without a link, a copy reads and writes
            return (Use("link", rate_Bps), Use("dram", dram_Bps))
        return (Use("disk", 1.0), Use("dram", rate_Bps))

    # --- what each kind computes ---------------------------------------------------------------------------------
    def forward_of(self, segment: str, keeps_attention: bool = False) -> Work:
        """One block's forward for one micro-batch: products, attention, and elementwise traffic, which is about what
        its matrices take and give; and a copy of what attention gives, if that is kept."""
        shapes, index = self.shapes, self._block[segment]
        tokens = shapes.micro_batch_tokens
        block = shapes.spec.blocks[index]
        dense = sum(tensor.num_elements for tensor in block.tensors if len(tensor.shape) < 3)
        active = block_parameters(shapes.spec, index)
        if block.traits.runs_all_experts:
            active = sum(tensor.num_elements for tensor in block.tensors)
        num_documents = max(1, tokens // self.document_tokens)
        attention = num_documents * attention_flops(shapes.spec, index, [self.document_tokens])
        return Work(
            linear_flops=2 * min(dense, active) * tokens,
            expert_flops=2 * max(0, active - dense) * tokens,
            attention_s=attention / self.rates.attention_flops_per_s,
            hbm_bytes=shapes.linear_bytes[block.name] * (1.0 if shapes.compiled else sizes.EAGER_SAVED)
            + sizes.weights_bytes(shapes, segment)
            + (2 * shapes.attended_bytes[segment] if keeps_attention else 0),
        )

    def backward_of(self, segment: str, pools: Collection[str]) -> Work:
        """Gradients of inputs and weights, their sum in fp32, and what was not kept of the forward once more.

        `pools`: of the places that the op reads and writes.
        """
        forward, adds = self.forward_of(segment), sizes.gradient_bytes(self.shapes, segment) // 4 * ADD_BYTES
        trained, again = "g" in pools, 0 if "kept" in pools else 1
        attends, copied = again, 0
        if "attn" in pools:
            attends, copied = 0, 2 * self.shapes.attended_bytes[segment]
        products = (2 if trained else 1) + again
        return Work(
            linear_flops=products * forward.linear_flops,
            expert_flops=products * forward.expert_flops,
            attention_s=(ATTENTION_BACKWARD + attends) * forward.attention_s,
            hbm_bytes=(2 + again) * forward.hbm_bytes + copied + (adds if trained else 0),
        )

    def head_of(self, backward: bool) -> Work:
        """The loss of one micro-batch in chunks, and its gradients together with it."""
        shapes = self.shapes
        table = shapes.spec.vocab_size * shapes.spec.hidden_size
        tokens = shapes.micro_batch_tokens
        chunks = -(-tokens // shapes.loss_chunk_tokens)
        traffic = tokens * shapes.spec.vocab_size * LOGIT_TRAFFIC_BYTES[backward]
        adds = chunks * table * ADD_BYTES if backward else 0
        return Work(head_flops=(3 if backward else 1) * 2 * table * tokens, hbm_bytes=traffic + adds)

    def embed_bytes(self, a_value: int) -> int:
        """Of looking up, or of adding to, the rows of a micro-batch; `a_value`: bytes for each of its values."""
        return a_value * self.shapes.micro_batch_tokens * self.shapes.spec.hidden_size

    def update_of(self, op: Op, segment: str) -> Work:
        """AdamW over a segment, and what the run keeps besides, on the lane that it runs on."""
        layout = self.shapes.layouts[segment]
        moved_bytes = UPDATE_BYTES + sum(EXTRA_UPDATE_BYTES[kind] for kind in layout.extra_state)
        if op.lane is Lane.HOST:  # its rate was measured with AdamW alone
            return Work(host_params=layout.num_trainable * moved_bytes / UPDATE_BYTES)
        return Work(hbm_bytes=layout.num_trainable * moved_bytes)


@dataclass(frozen=True)
class VisitCosts:
    """Costs of the ops of a shorter schedule of the same run.

    `micro_batches`: how many of them one op stands for.
    """

    model: CostModel
    micro_batches: float
    _known: dict[tuple[object, ...], Cost] = field(default_factory=dict)

    def cost(self, op: Op) -> Cost:
        """Seconds of an op that has every resource to itself, and what it takes of those it shares meanwhile."""
        key = (op.segment, op.micro_batch is None, *_alike(op))
        known = self._known.get(key)
        if known is None:
            count = 1.0 if op.micro_batch is None else self.micro_batches
            cost = self.model.cost(op)
            known = self._known[key] = Cost(count * cost.seconds, cost.uses)
        return known

    def seconds(self, op: Op) -> float:
        """Of an op that has every resource to itself."""
        return self.cost(op).seconds

    def uses(self, op: Op) -> tuple[Use, ...]:
        """What it takes of shared resources while it runs at full speed."""
        return self.cost(op).uses

    def sharing(self) -> Sharing:
        """What ops share on this machine."""
        return Sharing(self.uses, self.model.capacity)


def _alike(op: Op) -> tuple[object, ...]:
    """Ops of one segment that agree in this cost the same."""
    last = op.reads[-1].pool if op.reads else "", op.writes[-1].pool if op.writes else ""  # what a block keeps
    return op.kind, op.lane, len(op.reads), len(op.writes), *last


def content_bytes(shapes: Shapes, place: Place, segment: str) -> int:
    """Bytes of what `place` holds for `segment`."""
    return CONTENT_BYTES[place.pool.rpartition(".")[2]](shapes, segment)


def _to_disk(op: Op) -> bool:
    return any(place.pool.startswith(("disk", "file")) for place in op.writes)


def _boundary(shapes: Shapes, _segment: str) -> int:
    return sizes.one_boundary_bytes(shapes)


def _nothing(_shapes: Shapes, _segment: str) -> int:
    return 0  # a few bytes


# Last word of a pool's name -> bytes of one place of it.
CONTENT_BYTES: Mapping[str, Callable[[Shapes, str], int]] = {
    "w": sizes.weights_bytes,
    "s": sizes.state_bytes,
    "state": sizes.state_bytes,
    "g": sizes.gradient_bytes,
    "grad": sizes.gradient_bytes,
    "act": _boundary,
    "h": _boundary,
    "dact": _boundary,
    "kept": lambda shapes, segment: shapes.saved_bytes[segment],
    "attn": lambda shapes, segment: shapes.attended_bytes[segment],
    "file": lambda shapes, segment: sizes.weights_bytes(shapes, segment) + sizes.state_bytes(shapes, segment),
    "call": _nothing,
    "loss": _nothing,
    "norm": _nothing,
    "cell": _nothing,
}


def _pools(op: Op) -> set[str]:
    return {place.pool for place in (*op.reads, *op.writes)}


_WORK: Mapping[Kind, Callable[[CostModel, Op, str], Work]] = {
    Kind.EMBED: lambda model, _op, _segment: Work(hbm_bytes=model.embed_bytes(LOOKUP_BYTES)),
    Kind.FORWARD: lambda model, op, segment: model.forward_of(segment, "attn" in _pools(op)),
    Kind.HEAD: lambda model, _op, _segment: model.head_of(backward=True),
    Kind.LOSS: lambda model, _op, _segment: model.head_of(backward=False),
    Kind.BACKWARD: lambda model, op, segment: model.backward_of(segment, _pools(op)),
    Kind.EMBED_BACKWARD: lambda model, _op, _segment: Work(hbm_bytes=model.embed_bytes(ADD_ROWS_BYTES)),
    Kind.ZERO: lambda model, _op, segment: Work(hbm_bytes=sizes.gradient_bytes(model.shapes, segment)),
    Kind.NORM: lambda model, _op, segment: Work(hbm_bytes=sizes.gradient_bytes(model.shapes, segment)),
    Kind.MERGE: lambda model, _op, segment: Work(hbm_bytes=3 * sizes.gradient_bytes(model.shapes, segment)),
    Kind.CLIP: lambda _model, _op, _segment: Work(fixed_s=CLIP_S),
    Kind.UPDATE: lambda model, op, segment: model.update_of(op, segment),
}

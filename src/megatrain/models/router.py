"""The balancing loss of routers (as `load_balancing_loss_func` of transformers), in a form that streams.

    f_e = choices of expert e / rows        P_e = sum of its probabilities / rows        loss = coefficient * E * f . P

over the rows of every layer with a router at once: it is no sum over layers. But f has no gradient, so the gradient at
a layer's own sum of probabilities is the same vector for every layer, known when the last layer has been through its
forward. So the forward leaves two sums over E a router, and the backward starts from them as from the hidden state.

A step's loss is sum over micro-batches of (token losses + supervised tokens * loss) / supervised tokens of the step.
Not counted: documents without a label, such as the padded tail. Probabilities are fp32, whatever the precision.
Legend: T tokens of a micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from megatrain.errors import ModelError
from megatrain.models.batch import IGNORED_LABEL, TokenBatch

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")

# Architectures whose loss in transformers has the term -> the class of their routers.
_TOP_K_ROUTERS = (
    *("Ernie4_5_Moe", "FlexOlmo", "Flint", "GptOss", "GraniteMoe", "GraniteMoeHybrid", "GraniteMoeSWA"),
    *("GraniteMoeShared", "Jamba", "Laguna", "LaraMini", "Mellum", "MiniMax", "MiniMaxM2", "Mixtral", "Olmoe"),
    *("Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3_5Moe"),
)
ROUTERS: Mapping[str, str] = MappingProxyType(
    {f"{name}ForCausalLM": f"{name}TopKRouter" for name in _TOP_K_ROUTERS} | {"JetMoeForCausalLM": "JetMoeTopKGating"}
)


class Balance(NamedTuple):
    """What a config asks of its routers."""

    coefficient: float
    num_experts: int
    num_chosen: int


class RouterSums(NamedTuple):
    """Of one router and one micro-batch, over its counted tokens."""

    probability_E: Tensor  # fp32; carries the gradient
    chosen_E: Tensor  # fp32 whole numbers


def first_setting(settings: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value under the first of `names` that has one."""
    return next((settings[name] for name in names if settings.get(name) is not None), None)


def balance_of(config: PreTrainedConfig, architecture: str) -> Balance | None:
    """None unless the config asks for router logits, which is how transformers is told to add its balancing loss."""
    settings = config.to_dict()
    if not settings.get("output_router_logits"):
        return None
    if architecture not in ROUTERS:
        raise ModelError(
            f"the config sets output_router_logits, but transformers has no router loss for {architecture}; "
            "set it to false in config.json, or router_aux_loss_coef to 0"
        )
    coefficient, num_experts, num_chosen = (
        first_setting(settings, names) for names in (_COEFFICIENTS, NUM_EXPERTS, NUM_CHOSEN)
    )
    if not isinstance(coefficient, float | int) or coefficient < 0:
        raise ModelError(
            f"the config sets output_router_logits and has router_aux_loss_coef {coefficient!r}; a number of at least "
            "0 is needed there"
        )
    return Balance(float(coefficient), num_experts, num_chosen)


def with_coefficient(config: PreTrainedConfig, coefficient: float | None) -> PreTrainedConfig:
    """A config that asks its routers for the balancing loss times `coefficient`, for 0 for none; None: as it is."""
    if coefficient is None:
        return config
    asked = deepcopy(config)
    asked.output_router_logits = coefficient > 0
    asked.router_aux_loss_coef = coefficient
    return asked


def listen(layers: nn.Module, architecture: str, num_experts: int) -> list[Tensor]:
    """A list that gets the logits of every router of `layers` that runs, in order. Refused: layers without routers.

    Logits are, of what a router returns, the first numbers with a column for each expert: versions of transformers
    return the same in another order.
    """
    name = ROUTERS[architecture]
    heard: list[Tensor] = []
    routers = [module for module in layers.modules() if type(module).__name__ == name]
    if not routers:
        raise ModelError(
            f"{architecture} has no {name} here, so its router loss would be left out; set "
            "output_router_logits to false in config.json, or use a transformers version that names its routers so"
        )
    for router in routers:
        router.register_forward_hook(lambda _router, _given, out: heard.append(_logits_of(out, num_experts)))
    return heard


def _logits_of(returned: Sequence[Any], num_experts: int) -> Tensor:
    tensors = (value for value in returned if isinstance(value, Tensor))
    return next(t for t in tensors if t.is_floating_point() and t.shape[-1] == num_experts)


def sums_of(logits: Sequence[Tensor], counted_T: Tensor, balance: Balance) -> list[RouterSums]:
    """The sums of a layer's routers (none, one, or more) from their logits_TE."""
    sums = []
    for logits_TE in logits:
        p_TE = logits_TE.float().softmax(-1)
        chosen_TE = torch.zeros_like(p_TE).scatter_(1, p_TE.topk(balance.num_chosen, -1).indices, 1.0)
        sums.append(RouterSums(*((x_TE * counted_T[:, None]).sum(0) for x_TE in (p_TE, chosen_TE))))
    return sums


@dataclass
class Tally:
    """What the layers of one micro-batch have left so far, and, once settled, the gradient at their probabilities."""

    counted_T: Tensor  # fp32: 1, or 0 where a token does not count
    num_supervised: Tensor  # fp32 0-d
    sums: list[RouterSums] = field(default_factory=list)
    gradient_E: Tensor | None = None

    def add(self, sums: Sequence[RouterSums]) -> None:
        """Note what the routers of one layer chose, in a forward pass."""
        self.sums += [RouterSums(one.probability_E.detach(), one.chosen_E) for one in sums]

    def settle(self, balance: Balance, inv_denominator: float) -> Tensor:
        """What the loss sum of the micro-batch grows by, fp64 0-d. Call it when every layer has been run, once."""
        rows = (self.counted_T.sum() * len(self.sums)).clamp(min=1.0)
        probability_E, chosen_E = torch.zeros(2, balance.num_experts, device=rows.device)
        for one in self.sums:
            probability_E += one.probability_E
            chosen_E += one.chosen_E
        with torch.enable_grad():
            probability_E = probability_E.clone().requires_grad_()
            balanced = balance.num_experts * torch.sum((chosen_E / rows) * (probability_E / rows))
            loss = (self.num_supervised * balance.coefficient) * balanced
        (self.gradient_E,) = torch.autograd.grad(loss, probability_E, loss.new_full((), inv_denominator))
        self.sums.clear()
        return loss.detach().double()


def tally_of(batch: TokenBatch) -> Tally:
    """An empty tally. A document counts if it has a label. Nothing waits for the device."""
    labelled_T = (batch.labels_T != IGNORED_LABEL).long()
    ids_T = batch.document_ids_T
    before_T = torch.cat([labelled_T.new_zeros(1), labelled_T.cumsum(0)])
    first_T, stop_T = torch.searchsorted(ids_T, ids_T), torch.searchsorted(ids_T, ids_T, right=True)
    return Tally((before_T[stop_T] > before_T[first_T]).float(), labelled_T.sum().float())

"""Compiled layers have a few graphs, whatever tokens come and however documents are cut; or their family says so."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from megatrain.errors import ModelError
from megatrain.models import template as template_module
from megatrain.models.families import FAMILIES
from megatrain.models.meta import architecture_of
from megatrain.models.template import ModelTemplate, leaves_of
from tests.families import CASES, mostly_slow, tiny_batch, tiny_config, tiny_masters
from tests.reference import compute_weight

TOKENS = 64
ROUTED = ("jetmoe", "longcat_flash")


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run as they are traced; what `compile_blocks` sets is set back."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False, recompile_limit=8):
        yield
    torch._dynamo.reset()


def graphs(family: str, num_micro_batches: int) -> Iterator[int]:
    """How many there are after each micro-batch: other tokens, other lengths of documents, as many tokens in all."""
    template = ModelTemplate(tiny_config(family), torch.device("cpu"), torch.bfloat16)
    template.compile_blocks()
    masters = tiny_masters(template.spec)
    weights = [{t.local: compute_weight(masters[t.name], "bf16") for t in s.tensors} for s in template.spec.segments]
    leaves = [
        leaves_of(w, template.trainable(block)) for w, block in zip(weights[1:-1], template.spec.blocks, strict=True)
    ]
    for seed in range(num_micro_batches):
        first = 5 + 7 * seed % (TOKENS - 10)
        h, calls = template.embed(weights[0], tiny_batch((first, TOKENS - first), seed=seed))
        for index, w in enumerate(leaves):
            h = template.apply_block(index, w, h.detach().requires_grad_(), calls).h.detach()
        yield counters["stats"]["unique_graphs"]


def test_which_families_have_no_one_graph() -> None:
    without = {name for name, family in FAMILIES.items() if not family.one_graph}
    assert without == {architecture_of(tiny_config(family)) for family in ROUTED}


@pytest.mark.parametrize(
    "family", mostly_slow([case for case in CASES if case not in ROUTED], "llama", "gemma3", "lfm2", "mamba", "mixtral")
)
def test_no_graph_is_made_after_the_second_micro_batch(family: str) -> None:
    counted = list(graphs(family, 8))
    assert 0 < counted[1] == counted[-1], counted


@pytest.mark.parametrize("family", ROUTED)
def test_a_layer_that_is_compiled_again_and_again_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many graphs as a run may have: an architecture that nobody tried could be such a one."""
    monkeypatch.setattr(template_module, "RECOMPILE_LIMIT", 4)
    with pytest.raises(ModelError, match=r"DecoderLayer was compiled 4 times .*; set compile to false"):
        list(graphs(family, 40))

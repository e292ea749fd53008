"""Plans drawn at random, every segment by itself, and a tiny model that runs under one of them."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig

from megatrain.engine import Engine, Numerics
from megatrain.engine.chaos import Chaos
from megatrain.errors import PlanError
from megatrain.models.layout import embedding_of, layout_of
from megatrain.models.spec import ModelSpec, SegmentSpec
from megatrain.models.template import ModelTemplate
from megatrain.schedule.plan import Plan, SegmentPlan, validate
from megatrain.store.store import SegmentStore
from tests.engine.streamed import CHUNK_TOKENS, Streamed


def random_plan(dice: random.Random, spec: ModelSpec, num_micro_batches: int) -> Plan:
    """Any plan that a schedule can follow: homes, slots, rounds, activations, where updates run, one pass or two."""
    while True:
        plan = _drawn(dice, spec, num_micro_batches)
        try:
            validate(plan)
        except PlanError:
            continue
        return plan


def mixes_all(plan: Plan) -> bool:
    """Whether state is in all three tiers, and both the device and the CPU update."""
    trained = [segment for segment in plan.segments if segment.trainable]
    engines = {segment.state == "hbm" or segment.streams_state for segment in trained}
    return {segment.state for segment in trained} == {"hbm", "ram", "disk"} and engines == {True, False}


def sample(spec: ModelSpec, num_micro_batches: int, anyhow: int, mixed: int) -> list[tuple[int, str, Plan]]:
    """(seed, precision, plan): `anyhow` as they come, and `mixed` more that mix all."""

    def played(seed: int) -> tuple[int, str, Plan]:
        dice = random.Random(seed)
        return seed, dice.choice(["bf16", "bf16", "fp32"]), random_plan(dice, spec, num_micro_batches)

    further = (drawn for drawn in map(played, count(anyhow)) if mixes_all(drawn[2]))
    return [*map(played, range(anyhow)), *islice(further, mixed)]


def _drawn(dice: random.Random, spec: ModelSpec, num_micro_batches: int) -> Plan:
    two_pass = dice.random() < 0.25
    # of all that may be chosen, a few at a time: a plan that mixes everything seldom shows what one choice does alone
    homes = dice.sample(["hbm", "ram", "disk"], dice.randint(1, 3))
    activations = dice.sample(["recompute", "keep", "offload", "keep_attention"], dice.randint(1, 3))
    attend = {block.name for block, shape in zip(spec.blocks, spec.attention, strict=True) if shape.can_be_kept}
    segments = tuple(
        _segment(
            dice, segment, homes, [a for a in activations if a != "keep_attention" or segment.name in attend], two_pass
        )
        for segment in spec.segments
    )
    pooled = sum(segment.weights == "pool" for segment in segments)
    return Plan(
        segments,
        spec.tied,
        weight_slots=dice.randint(min(2, max(1, pooled)), 4),
        grad_slots=dice.randint(1, 3),
        round_micro_batches=num_micro_batches if two_pass else dice.randint(1, num_micro_batches),
        embedding_trainable=embedding_of(spec).trainable,
        disk_slots=dice.randint(1, 3),
        act_slots=dice.randint(2, 3),
        clip_mode="two-pass" if two_pass else "deferred",
        grad_landing_slots=dice.randint(1, 3) if two_pass else 0,
        state_slots=dice.randint(1, 3),
    )


def _segment(
    dice: random.Random, segment: SegmentSpec, homes: list[str], activations: list[str], two_pass: bool
) -> SegmentPlan:
    trainable = any(tensor.trainable for tensor in segment.tensors)
    home = dice.choice(homes)
    streamed = home == "ram" and not two_pass and trainable and dice.random() < 0.3
    own = segment.kind != "block" or home == "hbm"
    return SegmentPlan(
        segment.name,
        segment.kind,
        trainable,
        weights="own" if own or dice.random() < 0.2 else "pool",
        grads="own" if own or dice.random() < 0.2 else "pool",
        state="ram" if home == "disk" and not trainable else home,  # type: ignore[arg-type]
        activations=dice.choice(activations or ["recompute"]) if segment.kind == "block" else "recompute",  # type: ignore[arg-type]
        update="device" if streamed else "home",
        weights_home="disk" if home == "disk" and dice.random() < 0.6 else "ram",
    )


class Following(Streamed):
    """A model that follows a plan, whatever it is."""

    def __init__(
        self,
        config: PreTrainedConfig,
        masters: Mapping[str, np.ndarray],
        micro_batch_tokens: int,
        plan: Plan,
        *,
        precision: str,
        chaos: Chaos | None = None,
        device: str = "cpu",
        threads: int = 1,
        chunk_tokens: int = CHUNK_TOKENS,
        freeze: tuple[str, ...] = (),
    ) -> None:
        self.device = torch.device(device)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self.template = ModelTemplate(config, self.device, dtype, freeze=freeze, attn_implementation="megatrain")
        layouts = [layout_of(segment) for segment in self.template.spec.segments]
        self.store = SegmentStore(layouts, precision, plan, self.device, Path(tempfile.gettempdir()))
        for name, layout in self.store.layouts.items():
            with self.store.visit(name, write=True):
                for entry in layout.entries:
                    values = torch.from_numpy(np.array(masters[entry.tensor.name], dtype=np.float32)).flatten()
                    self.store.set_master(name, entry, values)
        numerics = Numerics(micro_batch_tokens, chunk_tokens, 1.0)
        self.engine = Engine(
            self.template, self.store, plan, numerics, self.device, optimizer_threads=threads, chaos=chaos
        )

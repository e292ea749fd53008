"""Runs tiny models through the engine, for tests that compare the result with the reference or with itself."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig

from megatrain.engine import Engine, Numerics, StepResult
from megatrain.engine.chaos import Chaos
from megatrain.models.batch import TokenBatch
from megatrain.models.determinism import repeat_bits
from megatrain.models.layout import Entry, embedding_of, layout_of
from megatrain.models.spec import ModelSpec
from megatrain.models.template import ModelTemplate
from megatrain.optim import AdamW
from megatrain.schedule.plan import Plan, SegmentPlan
from megatrain.store.store import SegmentStore

CHUNK_TOKENS = 24  # smaller than a micro-batch, and no divisor of it


@dataclass(frozen=True)
class Placement:
    """Everything that may not change a bit."""

    weight_slots: int = 2
    grad_slots: int = 2
    round_micro_batches: int = 8
    keep: bool = False
    keep_attention: bool = False  # of every block that can
    offload: bool = False  # every block's input
    act_slots: int = 2
    two_pass: bool = False  # there, resident blocks share the gradient slots
    resident: frozenset[str] = frozenset()  # segments whose state lives in "hbm"
    streamed: frozenset[str] = frozenset()  # segments whose state lives in RAM and is updated on the device
    state_slots: int = 2  # which they share
    own: frozenset[str] = frozenset()  # blocks with a weight and gradient slot of their own, state in RAM
    threads: int = 1
    state_on_disk: frozenset[str] = frozenset()
    weights_on_disk: frozenset[str] = frozenset()
    disk_slots: int = 2


TWO_SLOTS = Placement()


def make_plan(spec: ModelSpec, placement: Placement) -> Plan:
    """A plan of `placement` for `spec`."""

    can_be_kept = {block.name for block, shape in zip(spec.blocks, spec.attention, strict=True) if shape.can_be_kept}

    def segment(name: str, kind: str, trainable: bool) -> SegmentPlan:
        at_home = name in placement.resident
        streamed = name in placement.streamed
        own = at_home or kind != "block" or name in placement.own
        activations = "recompute"
        if kind == "block":
            activations = "keep" if placement.keep else "offload" if placement.offload else "recompute"
            if placement.keep_attention and name in can_be_kept:
                activations = "keep_attention"
        plan = SegmentPlan(name, kind, trainable, activations=activations)
        if own:
            shares = placement.two_pass and at_home and kind == "block" and name not in placement.own
            grads = "pool" if shares else "own"
            plan = replace(plan, weights="own", grads=grads)
        if streamed:
            plan = replace(plan, update="device")
        if name in placement.weights_on_disk:
            plan = replace(plan, weights_home="disk")
        if name in placement.state_on_disk and trainable:
            plan = replace(plan, state="disk")
        return replace(plan, state="hbm") if at_home else plan

    segments = tuple(segment(s.name, s.kind, any(t.trainable for t in s.tensors)) for s in spec.segments)
    return Plan(
        segments,
        spec.tied,
        placement.weight_slots,
        placement.grad_slots,
        placement.round_micro_batches,
        embedding_of(spec).trainable,
        placement.disk_slots,
        placement.act_slots,
        "two-pass" if placement.two_pass else "deferred",
        2 if placement.two_pass else 0,
        placement.state_slots if placement.streamed else 0,
    )


class Streamed:
    """A tiny model in an engine. `state()` flushes and gives what the reference gives: name -> (master, m, v)."""

    def __init__(
        self,
        config: PreTrainedConfig,
        masters: Mapping[str, np.ndarray],
        micro_batch_tokens: int,
        *,
        precision: str,
        placement: Placement = TWO_SLOTS,
        max_grad_norm: float | None = 1.0,
        chaos: Chaos | None = None,
        device: str = "cpu",
        freeze: Sequence[str] = (),
        compiled: bool = False,
        label_smoothing: float = 0.0,
        neftune: tuple[float, int] | None = None,  # (alpha, seed)
        ema_decay: float | None = None,
    ) -> None:
        self.device = torch.device(device)
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        if device == "cuda":
            repeat_bits(True)
        self.template = ModelTemplate(config, self.device, dtype, freeze=freeze, attn_implementation="megatrain")
        if compiled:
            self.template.compile_blocks()
        spec = self.template.spec
        plan = make_plan(spec, placement)
        folder = Path(tempfile.gettempdir())
        extra_state = () if ema_decay is None else ("ema",)
        layouts = [layout_of(segment, extra_state) for segment in spec.segments]
        self.store = SegmentStore(layouts, precision, plan, self.device, folder)
        for name, layout in self.store.layouts.items():
            with self.store.visit(name, write=True):
                for entry in layout.entries:
                    values = torch.from_numpy(np.array(masters[entry.tensor.name], dtype=np.float32)).flatten()
                    self.store.set_master(name, entry, values)
        noise = neftune or (None, 0)
        numerics = Numerics(micro_batch_tokens, CHUNK_TOKENS, max_grad_norm, label_smoothing, *noise, ema_decay)
        self.engine = Engine(
            self.template, self.store, plan, numerics, self.device, optimizer_threads=placement.threads, chaos=chaos
        )

    def train(self, steps: Sequence[Sequence[TokenBatch]], hypers: Sequence[AdamW]) -> list[StepResult]:
        """One optimizer step a list of micro-batches."""
        results = []
        counts = [sum(int((batch.labels_T >= 0).sum()) for batch in micro_batches) for micro_batches in steps]
        for step, (micro_batches, hyper, supervised) in enumerate(zip(steps, hypers, counts, strict=True), start=1):
            results.append(self.engine.train_step(micro_batches, supervised, hyper, step))
        return results

    def state(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Checkpoint name -> (fp32 master, m, v), every pending update applied."""
        self.engine.flush()
        found = {}
        for name, layout in self.store.layouts.items():
            with self.store.visit(name):
                for entry in layout.entries:
                    found[entry.tensor.name] = self._master_m_v(name, entry)
        return found

    def _master_m_v(self, segment: str, entry: Entry) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        shape, cut = entry.tensor.shape, slice(entry.offset, entry.stop)
        w = self.store.master(segment, entry).numpy().reshape(shape).copy()
        if not entry.tensor.trainable:
            return w, np.zeros_like(w), np.zeros_like(w)
        m, v = (self.store.flat(segment, kind)[cut].cpu().numpy().reshape(shape).copy() for kind in ("m", "v"))
        return w, m, v

    def averages(self) -> dict[str, np.ndarray]:
        """Checkpoint name -> running average of the master, of every trained tensor, every pending update applied."""
        self.engine.flush()
        found = {}
        for name, layout in self.store.layouts.items():
            with self.store.visit(name):
                for entry in layout.entries:
                    if entry.tensor.trainable:
                        flat = self.store.flat(name, "ema")[entry.offset : entry.stop]
                        found[entry.tensor.name] = flat.cpu().numpy().reshape(entry.tensor.shape).copy()
        return found

    def close(self) -> None:
        """Stop the lanes, give the memory back."""
        self.engine.close()
        self.store.close()


def same_bytes(left: Mapping[str, tuple[np.ndarray, ...]], right: Mapping[str, tuple[np.ndarray, ...]]) -> list[str]:
    """Names (and w, m or v) of the tensors that differ in any bit; empty means equal."""
    assert left.keys() == right.keys()
    return [
        f"{name}.{kind}"
        for name in left
        for kind, a, b in zip("wmv", left[name], right[name], strict=True)
        if a.tobytes() != b.tobytes()
    ]

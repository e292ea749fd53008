"""On a GPU: the engine equals the reference loop, and itself from run to run, under every placement and chaos."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from megatrain.engine.chaos import Chaos
from megatrain.engine.lanes import StreamLane
from megatrain.models.batch import TokenBatch
from megatrain.models.spec_of import model_spec
from megatrain.optim import AdamW
from megatrain.schedule.ops import Kind, Op
from tests import reference
from tests.engine.streamed import CHUNK_TOKENS, Placement, Streamed, same_bytes
from tests.families import FAMILIES, tiny_batch, tiny_config, tiny_masters

pytestmark = pytest.mark.gpu

TOKENS = 256
STEPS = 10
HYPERS = [AdamW(1e-2 / (k + 1), 0.9, 0.95, 1e-8, 0.1) for k in range(STEPS)]
ALL_AT_HOME = frozenset({"EMBED", "L000", "L001", "L002", "HEAD"})
PLACEMENTS = {
    "two slots": Placement(threads=4),
    "three slots, two rounds": Placement(weight_slots=3, grad_slots=1, round_micro_batches=2),
    "two passes": Placement(two_pass=True, resident=frozenset({"HEAD"})),
    "kept": Placement(keep=True),
    "inputs offloaded": Placement(offload=True, round_micro_batches=2),
    "embedding at home": Placement(resident=frozenset({"EMBED", "L000"})),
    "state streamed": Placement(streamed=frozenset({"EMBED", "L000", "HEAD"})),
    "state streamed, others at home, two rounds": Placement(
        streamed=frozenset({"EMBED", "L001"}), resident=frozenset({"HEAD"}), round_micro_batches=2
    ),
    "everything at home, kept": Placement(resident=ALL_AT_HOME, keep=True),
    "on disk, one landing slot": Placement(state_on_disk=ALL_AT_HOME, weights_on_disk=ALL_AT_HOME, disk_slots=1),
    "all three tiers": Placement(
        state_on_disk=frozenset({"L001", "HEAD"}),
        weights_on_disk=frozenset({"L001", "L002"}),
        resident=frozenset({"EMBED"}),
        disk_slots=3,
        round_micro_batches=2,
    ),
}


def batches(steps: int = STEPS):
    """Steps of 3 micro-batches of 256 tokens in uneven documents."""
    lengths = [(100, 156), (256,), (17, 19, 120, 100)]
    return [[on_gpu(tiny_batch(cut, seed=10 * step + i)) for i, cut in enumerate(lengths)] for step in range(steps)]


def on_gpu(batch: TokenBatch) -> TokenBatch:
    return TokenBatch(*(tensor.cuda() for tensor in batch))


def streamed(
    family: str,
    precision: str,
    placement: Placement,
    *,
    steps: int = STEPS,
    chaos: Chaos | None = None,
    compiled: bool = False,
):
    config = tiny_config(family)
    names = {segment.name for segment in model_spec(config).segments}
    placement = replace(placement, resident=placement.resident & names, streamed=placement.streamed & names)
    masters = tiny_masters(model_spec(config))
    run = Streamed(
        config, masters, TOKENS, precision=precision, placement=placement, chaos=chaos, device="cuda", compiled=compiled
    )
    try:
        return run.train(batches(steps), HYPERS[:steps]), run.state()
    finally:
        run.close()


def plain(family: str, precision: str, prepare=lambda _: None) -> reference.Result:
    config = tiny_config(family)
    return reference.train(
        config, tiny_masters(model_spec(config)), batches(), HYPERS, precision=precision, max_grad_norm=1.0,
        chunk_tokens=CHUNK_TOKENS, attn_implementation="megatrain", device="cuda", prepare=prepare,
    )  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_runs_and_the_reference_agree(family, precision):
    results, state = streamed(family, precision, PLACEMENTS["two slots"])
    _, again = streamed(family, precision, PLACEMENTS["two slots"])
    assert same_bytes(state, again) == []
    want = plain(family, precision)
    assert [r.loss for r in results] == want.losses
    assert [r.grad_norm for r in results] == want.grad_norms
    assert same_bytes(state, want.state) == []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_no_placement_changes_a_bit(family, precision):
    states = {name: streamed(family, precision, placement)[1] for name, placement in PLACEMENTS.items()}
    for name, state in states.items():
        assert same_bytes(state, states["two slots"]) == [], name


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_compiled_equals_the_compiled_reference_under_every_placement(family):
    def compile_layers(model: nn.Module) -> None:
        torch._inductor.config.emulate_precision_casts = True
        for layer in model.model.layers:
            layer.compile(dynamic=False)

    want = plain(family, "bf16", compile_layers).state
    for name, placement in PLACEMENTS.items():
        _, state = streamed(family, "bf16", placement, compiled=True)
        assert same_bytes(state, want) == [], name


def test_fifty_seeds_of_chaos_change_no_bit():
    want = streamed("gemma3", "bf16", PLACEMENTS["two slots"], steps=2)[1]
    placements = list(PLACEMENTS.values())
    for seed in range(50):
        chaos = Chaos(seed, max_delay_s=0.0003)
        _, state = streamed("gemma3", "bf16", placements[seed % len(placements)], steps=2, chaos=chaos)
        assert same_bytes(state, want) == [], f"seed {seed}"


@pytest.mark.parametrize("placement", ["two slots", "state streamed"])
def test_a_step_never_synchronises_with_the_host(placement, monkeypatch):
    def polled(lane: StreamLane) -> None:  # the end of a lane's list, seen without a call that would block
        while not lane.stream.query():
            time.sleep(0.0002)

    monkeypatch.setattr(StreamLane, "drain", polled)
    config = tiny_config("llama")
    masters = tiny_masters(model_spec(config))
    run = Streamed(config, masters, TOKENS, precision="bf16", device="cuda", placement=PLACEMENTS[placement])
    *before, micro_batches = batches(3)
    run.train(before, HYPERS[:2])
    num_supervised = sum(int((batch.labels_T >= 0).sum()) for batch in micro_batches)
    clip = run.engine._handlers.table[Kind.CLIP]

    def clip_at_the_end(op: Op) -> None:
        torch.cuda.set_sync_debug_mode("default")  # the end of the step: here the host may read what came of it
        clip(op)

    run.engine._handlers.table[Kind.CLIP] = clip_at_the_end
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.engine.train_step(micro_batches, num_supervised, HYPERS[2], 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        run.close()


@pytest.mark.parametrize("placement", ["two slots", "state streamed"])
def test_no_device_memory_is_allocated_after_the_second_step(placement):
    config = tiny_config("llama")
    masters = tiny_masters(model_spec(config))
    run = Streamed(config, masters, TOKENS, precision="bf16", device="cuda", placement=PLACEMENTS[placement])
    steps = batches()
    run.train(steps[:2], HYPERS[:2])
    before = torch.cuda.memory_stats()["num_device_alloc"]
    run.train(steps[2:], HYPERS[2:])
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    run.close()

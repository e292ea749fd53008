"""Complaints about memory, disks and processors, heard of other tools: each cannot happen here.

The names are the public threads: project, number, what people said.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

import megatrain
from megatrain import optim
from megatrain.checkpoint import CheckpointWriter, Files, load_weights, save_checkpoint
from megatrain.memory import (
    HostArena,
    available_ram_bytes,
    peak_rss_bytes,
    register,
    reset_peak_rss,
    unregister,
)
from megatrain.memory.disk import DiskFile, padded
from megatrain.models.layout import layout_of
from megatrain.models.spec import ModelSpec, SegmentSpec, TensorSpec
from megatrain.models.spec_of import model_spec
from megatrain.optim import native
from megatrain.store import SegmentStore
from tests.checkpoint.checkpoint_cases import make_store
from tests.checkpoint.checkpoint_cases import tiny_config as checkpoint_config
from tests.cli.test_disk_run import plan_on_disk
from tests.cli.test_verbs import bits
from tests.cli.test_verbs import megatrain as run_megatrain
from tests.engine.streamed import TWO_SLOTS, Placement, Streamed, make_plan
from tests.families import tiny_batch, tiny_config, tiny_masters

GIB, MIB = 1 << 30, 1 << 20
HYPER = optim.AdamW(1e-3, 0.9, 0.95, 1e-8, 0.1)


def test_deepspeed_4239_killed_without_a_message(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code -9: the kernel ends what takes too much. Here it is told before anything is taken."""
    monkeypatch.setattr("megatrain.cli.assemble.available_ram_bytes", lambda: MIB)
    reset_peak_rss()
    before = peak_rss_bytes()
    assert run_megatrain("train", config) == 2
    shown = capsys.readouterr()
    assert "of ram, the budget is 1.00 MiB (all that is free)" in shown.err
    assert "memory.ram" not in shown.err, "no key makes more of it"
    assert "end other programs, or raise the memory limit of the container" in shown.err
    assert "Traceback" not in shown.err
    assert not (config.parent / "run").exists()
    assert peak_rss_bytes() - before < 256 * MIB


def test_psutil_2100_the_cgroup_is_ignored(tmp_path: Path) -> None:
    """A container of 2 GiB on a machine of 64 has 2 GiB."""
    group, proc = tmp_path / "cg/job", tmp_path / "proc"
    group.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {64 * MIB} kB\nMemAvailable: {64 * MIB} kB\n")
    (proc / "self/cgroup").write_text("0::/job\n")
    (proc / "self/mountinfo").write_text(f"31 23 0:28 / {tmp_path}/cg rw - cgroup2 cgroup2 rw\n")
    (group / "memory.max").write_text(f"{2 * GIB}\n")
    (group / "memory.current").write_text("0\n")
    (group / "memory.stat").write_text("inactive_file 0\n")
    assert available_ram_bytes(proc) == 2 * GIB


class Runtime:
    """CUDA's calls for pinning, where one registration may have so many bytes and all of them so many."""

    def __init__(self, most_at_once: int, most: int) -> None:
        self.most_at_once, self.most = most_at_once, most
        self.sizes: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, _flags: int) -> int:
        if size_bytes > self.most_at_once:
            return 1  # invalid argument
        if sum(self.sizes.values()) + size_bytes > self.most:
            return 2  # out of memory, says CUDA
        self.sizes[address] = size_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.sizes.pop(address, None) else 1


def reserved(num_bytes: int) -> torch.Tensor:
    """Address space of `num_bytes` that takes no memory until it is touched."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def test_wsl_14078_a_pin_limit_is_called_cuda_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(GIB, 3 * GIB)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("megatrain.memory.pinned.clear_last_error", lambda: None)
    pinned = register([reserved(5 * GIB)])
    assert pinned.refused is not None
    assert "pinning host memory was refused" in pinned.refused
    assert "after 3,221,225,472 of 5,368,709,120 bytes" in pinned.refused
    assert "ulimit -l" in pinned.refused
    assert "out of memory" not in pinned.refused.lower()
    assert (pinned.pinned_bytes, runtime.sizes) == (0, {})


def test_lmcache_1063_five_gigabytes_are_an_invalid_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(GIB, 64 * GIB)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pinned = register([reserved(5 * GIB + mmap.PAGESIZE)])
    assert (pinned.refused, pinned.pinned_bytes) == (None, 5 * GIB + mmap.PAGESIZE)
    assert max(runtime.sizes.values()) <= GIB
    unregister(pinned)
    assert not runtime.sizes


def test_what_travels_most_stays_pinned_where_states_that_pass_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that pinned weights and gradients before updates could pass still does."""
    spec = model_spec(tiny_config("llama"))
    plan = make_plan(spec, Placement(streamed=frozenset({"L000"})))
    layouts = [layout_of(segment) for segment in spec.segments]
    runtime = Runtime(GIB, GIB)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr("megatrain.memory.pinned.clear_last_error", lambda: None)

    def pinned_bytes() -> int:
        store = SegmentStore(layouts, "bf16", plan, torch.device("cuda"))
        found = sum(runtime.sizes.values())
        store.close()
        assert not runtime.sizes
        return found

    state_bytes = 10 * layouts[1].num_trainable  # lo, m, v
    often_bytes = pinned_bytes() - state_bytes
    assert often_bytes > 0
    runtime.most = often_bytes + state_bytes // 2
    with pytest.warns(UserWarning, match="pinning host memory was refused"):
        assert pinned_bytes() == often_bytes


@pytest.mark.gpu
def test_lmcache_1063_five_gigabytes_are_pinned_and_travel() -> None:
    arena = HostArena(5 * GIB)
    host = arena.view(0, 5 * GIB, torch.uint8)
    pinned = register([host])
    assert pinned.refused is None
    host[-1] = 7
    assert int(host[-MIB:].cuda(non_blocking=True)[-1]) == 7
    torch.cuda.synchronize()
    unregister(pinned)


def large_spec() -> ModelSpec:
    """Four tensors of 4 Mi parameters: 64 MiB of bf16 pairs, 192 MiB with AdamW's state."""
    tensors = tuple(TensorSpec(f"t{i}", f"t{i}", (1024, 4096), True, True) for i in range(4))
    return ModelSpec("X", (SegmentSpec("L000", "block", tensors),), False, 1, 1, (), 0, 1)


def test_transformers_13466_loading_needs_twice_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go from the file into their home in pieces: less than half of the file is ever beside it."""
    monkeypatch.setattr("megatrain.checkpoint.load_hf.BLOCK_BYTES", 4 * MIB)  # as a model of 16 times the size
    save_file({f"t{i}": torch.full((1024, 4096), float(i)) for i in range(4)}, tmp_path / "model.safetensors")
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    store = make_store(large_spec(), "bf16")
    load_weights(tmp_path, store, large_spec())  # the first call also makes threads and loads code
    reset_peak_rss()
    before = peak_rss_bytes()
    load_weights(tmp_path, store, large_spec())
    grown = peak_rss_bytes() - before
    assert float(store.flat("L000", "w")[-1]) == 3.0
    assert grown < file_bytes // 2, f"{grown:,} of {file_bytes:,} bytes"
    store.close()


class Nowhere(Files):
    """A disk that takes every byte and keeps none: memory alone is measured."""

    def write(self, fd: int, data: object) -> int:  # noqa: ARG002
        return memoryview(data).nbytes  # type: ignore[arg-type]


def test_torchtune_1092_out_of_memory_while_saving(tmp_path: Path) -> None:
    spec, store = large_spec(), make_store(large_spec(), "bf16")
    (tmp_path / "run").mkdir()
    writer = CheckpointWriter(
        tmp_path / "run", store, spec, checkpoint_config(), None, keep=2, run_facts={}, files=Nowhere()
    )
    state_bytes = sum(store.flat("L000", kind).nbytes for kind in ("w", "lo", "m", "v"))
    reset_peak_rss()
    before = peak_rss_bytes()
    save_checkpoint(writer, 1, lambda write: write("L000"), {"step": 1})
    grown = peak_rss_bytes() - before
    assert state_bytes == 12 * 16 * MIB
    assert grown < state_bytes // 2, f"{grown:,} beside {state_bytes:,} bytes"
    store.close()


class Largest(TorchDispatchMode):
    """Watches the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))  # type: ignore[operator]
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor):
                self.num_elements = max(self.num_elements, one.numel())
        return result


def test_transformers_12878_evaluation_runs_out_of_memory_where_training_fits() -> None:
    """Logits are never whole, nor kept: evaluating makes no larger tensor than training, and none of T x V."""
    config, tokens = tiny_config("llama"), 96
    config.vocab_size = 4096
    run = Streamed(config, tiny_masters(model_spec(config)), tokens, precision="fp32")
    try:
        batches = [tiny_batch((tokens,), seed=k) for k in range(3)]
        with Largest() as training:
            run.train([batches], [HYPER])
        with Largest() as evaluation:
            run.engine.evaluate(batches * 4)
    finally:
        run.close()
    assert 0 < evaluation.num_elements <= training.num_elements
    assert evaluation.num_elements < tokens * config.vocab_size


@pytest.mark.gpu
def test_transformers_12878_evaluation_takes_no_more_of_the_gpu_than_training() -> None:
    config, tokens = tiny_config("llama"), 512
    run = Streamed(config, tiny_masters(model_spec(config)), tokens, precision="bf16", device="cuda")
    try:
        a_round = [tiny_batch((tokens,), seed=k) for k in range(TWO_SLOTS.round_micro_batches)]
        batches = [type(batch)(*(tensor.cuda() for tensor in batch)) for batch in a_round]
        run.train([batches], [HYPER])
        trained_bytes = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run.engine.evaluate(batches * 2)
        assert torch.cuda.max_memory_allocated() <= trained_bytes
    finally:
        run.close()


def test_deepspeed_1635_cpu_adam_takes_22_seconds_for_1350_million() -> None:
    """61 Mparam/s then. One thread has to do four times that; it does thirty times on an idle machine."""
    count = 1 << 21
    rng = np.random.default_rng(0)
    w, m, g = (rng.standard_normal(count, np.float32) for _ in range(3))
    v = np.square(g)
    scalars = optim.scalars(HYPER, 5, 1.0)
    times_s = []
    for _ in range(12):
        started_s = time.thread_time()
        optim.update_fp32(w, m, v, g, scalars, decay=True, threads=1)
        times_s.append(time.thread_time() - started_s)
    assert count / min(times_s) > 4 * 61e6


def test_deepspeed_3223_the_cpu_optimizer_refuses_a_cuda_version() -> None:
    """Nothing is compiled at install or start, and the core knows neither CUDA nor torch: no version to disagree."""
    assert native.isas()
    cores = list(Path(next(iter(megatrain.__path__))).glob("_native*.so")) or [
        path for folder in megatrain.__path__ for path in Path(folder).glob("_native*.so")
    ]
    for core in cores:
        needs = core.read_bytes()
        assert not [name for name in (b"libcuda", b"libcudart", b"libtorch", b"libc10") if name in needs]


def test_deepspeed_2082_the_first_save_fails_on_nvme(config: Path, finished: Path, tiny_model: Path) -> None:
    """All weights and state on disk: the first step is saved, and is what a run in RAM saves."""
    plan = plan_on_disk(tiny_model, config.parent / "plan.json")
    assert run_megatrain("train", config, "--plan", plan, "save_steps=1", "eval_steps=100", "save_total_limit=9") == 0
    run = config.parent / "run"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step-{i}" for i in (1, 2, 3, 4)]
    for step in (2, 4):
        saved, other = bits(run, step), bits(finished / "run", step)
        assert saved.keys() == other.keys()
        assert all(torch.equal(saved[name], other[name]) for name in saved)


def test_deepspeed_4707_swap_files_are_named_by_address(tmp_path: Path) -> None:
    """What lives on disk is found by segment and kind; the file itself has no name, so no run meets another's."""
    table = {"L000.m": 5000, "L001.m": 5000}
    one, other = DiskFile(tmp_path, table), DiskFile(tmp_path, table)
    assert list(tmp_path.iterdir()) == []
    buffers = {}
    for number, name in enumerate(table):
        buffers[name] = HostArena(padded(5000)).view(0, padded(5000), torch.uint8)
        buffers[name].fill_(number + 1)
    one.write(list(buffers.items()))
    for buffer in buffers.values():
        buffer.fill_(9)
    other.write(list(buffers.items()))
    moved = [(name, HostArena(padded(5000)).view(0, padded(5000), torch.uint8)) for name in reversed(table)]
    one.read(moved)
    assert {name: int(buffer[4999]) for name, buffer in moved} == {"L000.m": 1, "L001.m": 2}
    for file in (one, other):
        file.close()

"""The benchmark of whole steps: systems run one after another under one setting; each line's figures are its own."""

from __future__ import annotations

import ast
import functools
import mmap
from pathlib import Path

import numpy as np
import pytest

import bench
from bench import step
from bench.__main__ import names
from bench.presets import PRESETS
from megatrain.engine.trace import Trace, TraceRow
from megatrain.schedule import Kind, Lane, Op

SMALL = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
LINE = (
    "--model small --device cpu --precision fp32 --eager --seq 16 --tokens 32 --micro-batch-tokens 16 --loss-chunk 16 "
    "--warm 0 --steps 1 --threads 1"
)
WORDS = LINE.split()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What is recorded of the small model's runs."""
    found: list[dict[str, object]] = []
    monkeypatch.setitem(PRESETS, "small", SMALL)
    monkeypatch.setattr(step, "record", lambda _kind, line, **_on: found.append(line))
    return found


def test_every_system_gives_a_line(lines: list[dict[str, object]]) -> None:
    systems = "megatrain,megatrain/keep_blocks=all,pytorch-hbm,pytorch-hbm-keep"
    assert step.main([*WORDS, "--systems", systems]) == 0
    assert [line["system"] for line in lines] == ["megatrain", "megatrain", "pytorch-hbm", "pytorch-hbm-keep"]
    assert [line["activations"] for line in lines] == ["recompute", "keep"] * 2


def test_a_peak_is_that_of_its_own_system(lines: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
    large_bytes = 256 << 20

    def large(*_: object, **__: object) -> step.Timing:
        with mmap.mmap(-1, large_bytes) as memory:  # malloc may keep what it gets
            np.frombuffer(memory, np.uint8)[:] = 1
        return step.Timing((1.0,), None, {}, 1.0)

    monkeypatch.setattr(step, "run_plain", large)
    assert step.main([*WORDS, "--systems", "pytorch-hbm,megatrain"]) == 0
    first_bytes, second_bytes = (line["peak_ram_bytes"] for line in lines)
    assert first_bytes - second_bytes > large_bytes // 2


def test_all_systems_of_a_gpu_run_under_one_setting(
    lines: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS reads its setting at the first product: plain PyTorch, asked for first, would run under another."""
    done: list[object] = []
    monkeypatch.setattr(step, "repeat_bits", done.append)
    monkeypatch.setattr(step, "random_batches", lambda *_: done.append("batches") or [])
    monkeypatch.setattr(step, "machine_name", str)
    for run in ("run_plain", "run_megatrain"):
        ran = functools.partial(lambda name, *_, **__: done.append(name) or step.Timing((1.0,), None, {}, 1.0), run)
        monkeypatch.setattr(step, run, ran)
    assert step.main([*WORDS, "--device", "cuda", "--systems", "pytorch-hbm,megatrain"]) == 0
    assert done == [True, "batches", "run_plain", "run_megatrain"]
    assert len(lines) == 2
    done.clear()
    assert step.main([*WORDS, "--systems", "pytorch-hbm"]) == 0
    assert done == ["batches", "run_plain"], "it is the GPU's kernels that need it"


@pytest.mark.parametrize("name", names())
def test_what_is_listed_is_a_benchmark(name: str) -> None:
    found = ast.parse((Path(bench.__file__).parent / f"{name}.py").read_text("utf-8"))
    assert "main" in {node.name for node in found.body if isinstance(node, ast.FunctionDef)}


def test_the_disk_is_busy_as_long_as_it_is_read_or_written_from_the_first_op_on() -> None:
    """The host's lane begins late, and is listed first: what the disk did before that counts, too."""
    times_s = [(Lane.HOST, 5.0, 6.0), (Lane.DISK, 0.5, 2.5), (Lane.DISK, 4.0, 7.0), (Lane.DISK_READ, 2.0, 4.5)]
    rows = [TraceRow(Op(Kind.CLIP, "", None, lane, (), ()), start_s, end_s) for lane, start_s, end_s in times_s]
    trace = Trace(tuple(rows))
    assert [start_s for _, start_s, _ in trace.timed()] == [4.5, 0.0, 3.5, 1.5]
    assert step.either_s(trace) == 6.5
    assert step.either_s(Trace(())) == 0.0

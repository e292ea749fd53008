"""docs/machines.md: what the planner says of well-known models on GPUs of several sizes.

`python -m bench machines` prints its table, `--write` puts it into the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from transformers import CONFIG_MAPPING

from bench.presets import PRESETS
from megatrain.config import RunConfig, resolved
from megatrain.hardware import Machine
from megatrain.hardware.rates import ASSUMED
from megatrain.models.spec import ModelSpec
from megatrain.models.spec_of import model_spec
from megatrain.planner import least_bytes, question_of
from megatrain.planner.table import gib

PAGE = Path(__file__).parents[1] / "docs" / "machines.md"
MODELS = (
    "qwen2.5-7b",
    "llama-3-8b",
    "qwen2.5-14b",
    "qwen3-30b-a3b",
    "qwen3-32b",
    "llama-3.3-70b",
    "qwen3-235b-a22b",
)
GPU_GIB = (16, 24, 48, 80, 141)
FREE_SHARE = 0.97  # of a GPU that nothing else uses
GIB = 1 << 30
PLENTY = 1 << 60
# From the most to the least comfortable: (micro_batch_tokens, loss_chunk_tokens).
SIZES_TOKENS = ((16384, 2048), (8192, 1024), (4096, 512), (2048, 256))
MAX_LENGTH, BATCH_ROWS = 2048, 64


def spec_of(name: str) -> ModelSpec:
    """The sizes of a preset."""
    fields = dict(PRESETS[name])
    return model_spec(CONFIG_MAPPING[str(fields.pop("model_type"))](**fields))


def machine(gpu_gib: int) -> Machine:
    """A machine with this GPU and as much RAM and disk as anyone could want."""
    free = int(gpu_gib * GIB * FREE_SHARE)
    return Machine("cuda", f"{gpu_gib} GiB", gpu_gib * GIB, free, PLENTY, PLENTY, PLENTY, 16, "x86_64")


class Fit(NamedTuple):
    """The most comfortable setting that fits a GPU, and what it needs of the other tiers at least."""

    tokens: int
    ram_bytes: int  # with nothing but checkpoints on the disk
    least_ram_bytes: int  # with all state there
    disk_bytes: int  # of the checkpoints


def best_fit(spec: ModelSpec, gpu_gib: int) -> Fit | None:
    """The fit of a model and a GPU; None if there is none."""
    on = machine(gpu_gib)
    for tokens, chunk in SIZES_TOKENS:
        asked = RunConfig(
            model="m",
            dataset="d",
            max_length=MAX_LENGTH,
            train_batch_size=BATCH_ROWS,
            micro_batch_tokens=tokens,
            loss_chunk_tokens=chunk,
            clip_mode="deferred",
        )
        question = question_of(spec, resolved(asked, "cuda", 16), on, ASSUMED["cuda"])
        disk_bytes = least_bytes(question, "disk")
        if disk_bytes is None:
            continue
        without_drive = replace(question, machine=replace(on, disk_free_bytes=disk_bytes))
        ram_bytes, least_ram_bytes = least_bytes(without_drive, "ram"), least_bytes(question, "ram")
        assert ram_bytes is not None
        assert least_ram_bytes is not None, "RAM is endless"
        return Fit(tokens, ram_bytes, least_ram_bytes, disk_bytes)
    return None


def cell(fit: Fit | None) -> str:
    """RAM that the run needs, without and with a drive for its state, and the micro-batch it works with."""
    if fit is None:
        return "–"
    drive = f" ({gib(fit.least_ram_bytes)})" if fit.least_ram_bytes < fit.ram_bytes else ""
    return f"{gib(fit.ram_bytes)}{drive}, {fit.tokens // 1024}K"


def rows() -> Iterator[str]:
    """The table, one line a model."""
    yield "| model | parameters | checkpoints | " + " | ".join(f"{size} GiB GPU" for size in GPU_GIB) + " |"
    yield "|---|---|---|" + "---|" * len(GPU_GIB)
    for name in MODELS:
        spec = spec_of(name)
        found = [best_fit(spec, size) for size in GPU_GIB]
        disk = next(gib(fit.disk_bytes) for fit in found if fit is not None)
        yield f"| {name} | {spec.num_parameters / 1e9:.1f} B | {disk} | " + " | ".join(map(cell, found)) + " |"


def page_with(table: str) -> str:
    """The page with this table in the place of the one it has."""
    before, _, rest = PAGE.read_text("utf-8").partition("| model |")
    return before + table + "\n" + rest.partition("\n\n")[2]


def main(argv: Sequence[str]) -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m bench machines")
    parser.add_argument("--write", action="store_true", help="put the table into docs/machines.md")
    table = "\n".join(rows()) + "\n"
    if parser.parse_args(argv).write:
        PAGE.write_text(page_with(table), "utf-8")
    print(table, end="")
    return 0

"""Preprocessing, all of it: read, detect, render the chat template, tokenise, mask, write the token file.

Two corpora of the same rows, as conversations and as plain text. Two figures: tokens a second by the clock, which
another program's load lowers, and tokens a second of processor time (of this process and of the one that reads for
it), which times the cores is the most that an idle machine gives. `tokenizer` is the library's fastest call alone, on
texts that are rendered already, in the same rounds: what is left for everything else; `of_tokenizer` is the share of
its rate that all of preprocessing reaches, by the clock and in processor time. `make demo` fetches the default
model and rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bench.results import record
from megatrain.data import DataOptions, prepare

GROUP = 512  # texts a call


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench data", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, default=Path(".demo/smollm2-135m"), help="a model folder")
    parser.add_argument("--rows", type=Path, default=Path(".demo/train.jsonl"), help="JSONL of `messages`")
    parser.add_argument("--copies", type=int, default=8, help="how often the rows are repeated (default 8)")
    parser.add_argument("--max-length", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="print, but do not append to bench/results/")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer, local_files_only=True)
    with tempfile.TemporaryDirectory() as folder:
        for path in corpora(args.rows, args.copies, Path(folder)):
            fields = measure(path, tokenizer, args.max_length, args.rounds)
            print(fields if args.dry_run else record("data", fields))
    return 0


def corpora(rows: Path, copies: int, folder: Path) -> Iterator[Path]:
    """The rows as they are, and as documents, `copies` times."""
    lines = rows.read_text("utf-8").splitlines()
    chats = folder / "messages.jsonl"
    chats.write_text("\n".join(lines * copies) + "\n", "utf-8")
    yield chats
    texts = ["\n".join(m["content"] for m in json.loads(line)["messages"]) for line in lines]
    documents = folder / "text.jsonl"
    documents.write_text("\n".join(json.dumps({"text": text}) for text in texts * copies) + "\n", "utf-8")
    yield documents


def measure(path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int, num_rounds: int) -> dict[str, object]:
    """Medians over `num_rounds` preparations into an empty cache; one before them warms up and is not counted."""
    texts = rendered(path, tokenizer)
    whole, alone = [], []
    for _ in range(num_rounds + 1):
        with tempfile.TemporaryDirectory() as cache:
            started_s, used_s = time.perf_counter(), processor_s()
            report = prepare(DataOptions((path,), max_length=max_length, cache_dir=Path(cache)), tokenizer).report
            whole.append((time.perf_counter() - started_s, processor_s() - used_s))
        started_s, used_s = time.perf_counter(), processor_s()
        for first in range(0, len(texts), GROUP):
            tokenizer.backend_tokenizer.encode_batch_fast(texts[first : first + GROUP], add_special_tokens=False)
        alone.append((time.perf_counter() - started_s, processor_s() - used_s))
    wall_s, cpu_s, tokenizer_wall_s, tokenizer_cpu_s = (
        statistics.median(column) for times in (whole, alone) for column in zip(*times[1:], strict=True)
    )
    shares = [  # round by round, so that a load that comes and goes meets both
        tuple(part / all_of_it for part, all_of_it in zip(*pair, strict=True))
        for pair in zip(alone[1:], whole[1:], strict=True)
    ]
    of_tokenizer, of_tokenizer_cpu = (round(statistics.median(column), 3) for column in zip(*shares, strict=True))
    return {
        "system": f"megatrain-{report.format}",
        "rows": report.rows_out,
        "tokens": report.num_tokens,
        "rows_truncated": report.num_truncated,
        "max_length": max_length,
        "tokens_per_s": round(report.num_tokens / wall_s),
        "tokens_per_cpu_s": round(report.num_tokens / cpu_s),
        "tokenizer_tokens_per_s": round(report.num_tokens / tokenizer_wall_s),
        "tokenizer_tokens_per_cpu_s": round(report.num_tokens / tokenizer_cpu_s),
        "of_tokenizer": of_tokenizer,
        "of_tokenizer_cpu": of_tokenizer_cpu,
        "load_average": round(os.getloadavg()[0], 1),
    }


def rendered(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts that the tokenizer reads, by transformers' own rendering."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [
        row["text"] if "text" in row else str(tokenizer.apply_chat_template(row["messages"], tokenize=False))
        for row in rows
    ]


def processor_s() -> float:
    """Seconds of processor time of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)

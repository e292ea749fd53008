"""Files to a token dataset: read, tokenise, account for every row; done once, then found again by content."""
from __future__ import annotations

import gc
import hashlib
import json
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from importlib import metadata
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.encode import Encoded, Encoder
from megatrain.data.formats import REMEDIES, BadSample
from megatrain.data.options import MAX_LISTED, BadRow, DataOptions, Format, Report
from megatrain.data.reader import GARBAGE_AFTER, Batch, Request, texts_from_process
from megatrain.data.rows import list_files
from megatrain.data.sandbox import PINNED_DATE, source_of
from megatrain.data.texts import Text
from megatrain.data.tokens import TokenDataset, TokenWriter, file_sha256, open_dataset
from megatrain.errors import DataError

MOSTLY_LEFT_OUT = "{:.0%} of its rows are left out; files of several formats are several datasets: [{{path: …}}]"

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODING_THREADS = 2            # one in the library, which needs no Python, while the other makes masks
VERSION = 3                     # of the token file and of everything that makes tokens: part of the cache key


def prepare(options: DataOptions, tokenizer: PreTrainedTokenizerBase) -> TokenDataset:
    """The tokenised dataset: from the cache when data, tokenizer, template and options are the same bit for bit,
    else made now. Raises DataError when no row can be used."""
    files = list_files(options.paths)
    names = [str(path) for path in files]
    key = cache_key(options, tokenizer, files)
    found = open_dataset(options.cache_dir / key, names)
    if found is not None:
        return found
    _set_aside(options.cache_dir / key)
    _write(options, tokenizer, files, key)
    made = open_dataset(options.cache_dir / key, names)
    if made is None:
        raise DataError(f"token file {options.cache_dir / key} does not read back as written; check the disk")
    return made


def cache_key(options: DataOptions, tokenizer: PreTrainedTokenizerBase, files: tuple[Path, ...]) -> str:
    """SHA-256 over everything the tokens depend on; file names are left out, so moved data keep their tokens."""
    parts = {
        "version": VERSION, "files": [[file_sha256(path), "".join(path.suffixes[-2:])] for path in files],
        "tokenizer": tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template, "date": PINNED_DATE.isoformat(), "format": options.format,
        "max_length": options.max_length, "truncation": options.truncation,
        "assistant_only_loss": options.assistant_only_loss, "train_roles": sorted(options.train_roles),
        "libraries": [metadata.version(name) for name in ("tokenizers", "transformers", "jinja2")],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def _set_aside(folder: Path) -> None:
    """Get a damaged cache folder out of the way without destroying it."""
    if folder.exists():
        number = 0
        while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
            number += 1
        folder.rename(aside)


class _Account:
    """Rows in, rows out, and why the others were left out."""

    def __init__(self, writer: TokenWriter, files: list[str]) -> None:
        self._writer = writer
        self._files = files
        self.rows_in = 0
        self.rows_out = 0
        self.num_truncated = 0
        self.reasons: Counter[str] = Counter()
        self.bad_rows: list[BadRow] = []

    def refuse(self, file: int, line: int, reason: str) -> None:
        bad = BadRow(self._files[file], line, reason)
        self.reasons[reason] += 1
        if len(self.bad_rows) < MAX_LISTED:
            self.bad_rows.append(bad)
        self._writer.add_bad(bad)


@contextmanager
def _loaded_is_no_garbage() -> Iterator[None]:
    """Python's collector looks at what is made meanwhile, and not at all that transformers has loaded: one look at that
    takes 0.15 s, in which no thread goes on."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def _write(options: DataOptions, tokenizer: PreTrainedTokenizerBase, files: tuple[Path, ...], key: str) -> None:
    names = list(dict.fromkeys(map(str, files)))
    request = Request(tuple(map(str, files)), options.format, options.assistant_only_loss, options.train_roles,
                      source_of(tokenizer))
    with (_loaded_is_no_garbage(), closing(texts_from_process(request)) as batches,
          ThreadPoolExecutor(ENCODING_THREADS) as pool):
        first = pool.submit(list, islice(batches, 1))       # the process starts while the tokenizer is looked at
        encoder = Encoder(tokenizer, max_length=options.max_length, truncation=options.truncation,
                          assistant_only_loss=options.assistant_only_loss)
        vocabulary = max(tokenizer.get_vocab().values()) + 1
        token_dtype = np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)
        with TokenWriter(options.cache_dir, key, token_dtype) as writer:
            account = _Account(writer, names)
            row_format, warnings = None, ()
            for batch, results in _encoded(chain(first.result(), batches), encoder, pool):
                row_format, warnings = batch.format, batch.warnings
                _take(batch, results, writer, account)
            report = _report(options, row_format, writer, account, (*warnings, *_endless(row_format, tokenizer)))
            writer.commit(report, is_documents=row_format == "text", pad_id=_pad_id(tokenizer), files=names)


def _endless(row_format: Format | None, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    if row_format in ("text", "prompt_completion") and tokenizer.eos_token_id is None:
        return ("the tokenizer has no end-of-sequence token: the model will not learn to stop",)
    return ()


def _encoded(batches: Iterator[Batch], encoder: Encoder,
             pool: Executor) -> Iterator[tuple[Batch, list[Encoded | BadSample]]]:
    """Batches in order with their texts as tokens. While the library works on one, free of Python, masks of another are
    made."""
    waiting: deque[tuple[Batch, Future[list[Encoded | BadSample]]]] = deque()
    for batch in batches:
        texts = [item.text for item in batch.items if isinstance(item.text, Text)]
        waiting.append((batch, pool.submit(encoder.encode, texts)))
        if len(waiting) > ENCODING_THREADS:
            first, results = waiting.popleft()
            yield first, results.result()
    for first, results in waiting:
        yield first, results.result()


def _take(batch: Batch, results: list[Encoded | BadSample], writer: TokenWriter, account: _Account) -> None:
    account.rows_in += len(batch.items)
    remaining = iter(results)
    for file, line, text in batch.items:
        result = text if isinstance(text, str) else next(remaining)
        if not isinstance(result, Encoded):
            account.refuse(file, line, str(result))
            continue
        writer.add(result.ids, result.trained, file, line)
        account.rows_out += 1
        account.num_truncated += result.truncated


def _report(options: DataOptions, row_format: Format | None, writer: TokenWriter, account: _Account,
            warnings: tuple[str, ...]) -> Report:
    where = ", ".join(str(path) for path in options.paths)
    assert account.rows_in == account.rows_out + account.reasons.total()
    if account.rows_in == 0:
        raise DataError(f"dataset {where} is empty: it holds no row")
    if account.rows_out == 0 or row_format is None:
        first = account.bad_rows[0]
        reasons = account.reasons.most_common(3)
        common = "; ".join(f"{count} × {reason}" for reason, count in reasons)
        remedy = REMEDIES.get(reasons[0][0], "mend the rows, or name the right `format`")
        raise DataError(f"dataset {where}: none of its {account.rows_in} rows can be trained on ({common}; the first "
                        f"at {first.file} line {first.line}); {remedy}")
    if row_format != "text" and options.assistant_only_loss and writer.num_trained == writer.num_tokens:
        raise DataError(f"dataset {where}: every token would be trained, prompts too, although assistant_only_loss is "
                        "on; check the chat template's generation marks, or set assistant_only_loss: false")
    if 2 * account.rows_out < account.rows_in:
        left_out = 1 - account.rows_out / account.rows_in
        warnings = (*warnings, MOSTLY_LEFT_OUT.format(left_out))
    lengths = writer.lengths
    bounds = 1 << np.ceil(np.log2(lengths)).astype(np.int64)
    histogram = {int(bound): int(count) for bound, count in zip(*np.unique(bounds, return_counts=True), strict=True)}
    return Report(format=row_format, rows_in=account.rows_in, rows_out=account.rows_out, num_tokens=writer.num_tokens,
                  num_trained=writer.num_trained, num_truncated=account.num_truncated,
                  longest_tokens=int(lengths.max()), reasons=dict(account.reasons),
                  bad_rows=tuple(account.bad_rows), length_histogram=histogram, warnings=warnings)


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    return 0

"""Files to a token dataset: read, tokenise, account for every row; done once, then found again by content."""
from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tokenizers
import transformers

from megatrain.data.formats import BadSample, Sample, detect, to_sample
from megatrain.data.options import MAX_LISTED, BadRow, DataOptions, Format, Report
from megatrain.data.render import Renderer
from megatrain.data.rows import Row, list_files, read_rows
from megatrain.data.template import PINNED_DATE
from megatrain.data.tokens import TokenDataset, TokenWriter, file_sha256, open_dataset
from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VERSION = 2                     # of the token file and of everything that makes tokens: part of the cache key
BATCH_ROWS = 512
BATCH_BYTES = 4 << 20           # of text handed to the tokenizer at once


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
        "libraries": [tokenizers.__version__, transformers.__version__],
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

    def __init__(self, writer: TokenWriter) -> None:
        self._writer = writer
        self.rows_in = 0
        self.rows_out = 0
        self.num_truncated = 0
        self.reasons: Counter[str] = Counter()
        self.bad_rows: list[BadRow] = []

    def refuse(self, row: Row, reason: str) -> None:
        bad = BadRow(row.file, row.line, reason)
        self.reasons[reason] += 1
        if len(self.bad_rows) < MAX_LISTED:
            self.bad_rows.append(bad)
        self._writer.add_bad(bad)


def _write(options: DataOptions, tokenizer: PreTrainedTokenizerBase, files: tuple[Path, ...], key: str) -> None:
    renderer = Renderer(tokenizer, max_length=options.max_length, truncation=options.truncation,
                        assistant_only_loss=options.assistant_only_loss, train_roles=options.train_roles)
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    with TokenWriter(options.cache_dir, key, np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)) as writer:
        account = _Account(writer)
        row_format = options.format
        indices = {str(path): i for i, path in enumerate(files)}
        for batch in _batches(files):
            if row_format is None:
                row_format = detect(batch)
            _tokenise(batch, row_format, renderer, writer, account, indices)
        report = _report(options, row_format, writer, account, renderer.warnings())
        writer.commit(report, is_documents=row_format == "text", pad_id=_pad_id(tokenizer), files=list(indices))


def _batches(files: tuple[Path, ...]) -> Iterator[list[Row]]:
    """Rows in groups of bounded text; a group never spans two formats unless the data do."""
    batch: list[Row] = []
    num_bytes = 0
    for path in files:
        for row in read_rows(path):
            batch.append(row)
            num_bytes += _text_size(row.value)
            if len(batch) >= BATCH_ROWS or num_bytes >= BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
    if batch:
        yield batch


def _text_size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    if isinstance(value, list):
        return sum(map(_text_size, value))
    return 0


def _tokenise(batch: list[Row], row_format: Format | None, renderer: Renderer, writer: TokenWriter, account: _Account,
              indices: dict[str, int]) -> None:
    good: list[tuple[Row, Sample]] = []
    for row in batch:
        account.rows_in += 1
        if row.value is None:
            assert row.problem is not None
            account.refuse(row, row.problem)
            continue
        assert row_format is not None, "a readable row has been seen, so the format is known"
        try:
            good.append((row, to_sample(row.value, row_format)))
        except BadSample as bad:
            account.refuse(row, str(bad))
    for (row, _), result in zip(good, renderer.encode([sample for _, sample in good]), strict=True):
        if isinstance(result, BadSample):
            account.refuse(row, str(result))
            continue
        writer.add(result.ids, result.trained, indices[row.file], row.line)
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
        common = "; ".join(f"{count} × {reason}" for reason, count in account.reasons.most_common(3))
        raise DataError(f"dataset {where}: none of its {account.rows_in} rows can be trained on ({common}; the first "
                        f"at {first.file} line {first.line}); mend the rows, or name the right `format`")
    if row_format != "text" and options.assistant_only_loss and writer.num_trained == writer.num_tokens:
        raise DataError(f"dataset {where}: every token would be trained, prompts too, although assistant_only_loss is "
                        "on; check the chat template's generation marks, or set assistant_only_loss: false")
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

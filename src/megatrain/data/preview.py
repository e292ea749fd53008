"""The first samples as a person reads them: text, and which of it is trained; read back from the token file."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatrain.data.tokens import TokenDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreviewRow:
    """One sample: where it came from, its size, and its text in runs of (text, trained)."""
    file: str
    line: int
    num_tokens: int
    num_trained: int
    pieces: tuple[tuple[str, bool], ...]


def preview(dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase, *, num_rows: int = 3,
            max_tokens: int = 2048) -> tuple[PreviewRow, ...]:
    """The first samples of the dataset, each shown up to `max_tokens`."""
    return tuple(_row(dataset, tokenizer, sample_id, max_tokens)
                 for sample_id in range(min(num_rows, dataset.num_samples)))


def _row(dataset: TokenDataset, tokenizer: PreTrainedTokenizerBase, sample_id: int, max_tokens: int) -> PreviewRow:
    start, stop = int(dataset.offsets[sample_id]), int(dataset.offsets[sample_id + 1])
    trained = dataset.trained(start, stop)
    shown = min(stop - start, max_tokens)
    edges = np.flatnonzero(np.diff(trained[:shown])) + 1
    pieces = []
    for first, last in zip([0, *edges.tolist()], [*edges.tolist(), shown], strict=True):
        ids = dataset.tokens[start + first:start + last].tolist()
        pieces.append((tokenizer.decode(ids, skip_special_tokens=False), bool(trained[first])))
    file, line = dataset.source(sample_id)
    return PreviewRow(file, line, stop - start, int(np.count_nonzero(trained)), tuple(pieces))

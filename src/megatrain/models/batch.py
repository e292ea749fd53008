"""TokenBatch: one micro-batch as the templates see it. Legend: T tokens of a micro-batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

IGNORED_LABEL = -100


class TokenBatch(NamedTuple):
    """One micro-batch on the device: documents packed end to end, the tail padded with a document of its own."""

    input_ids_T: Tensor  # int64
    position_ids_T: Tensor  # int64, restarts at 0 in every document
    document_ids_T: Tensor  # int32, non-decreasing, one number a document
    labels_T: Tensor  # int64, already shifted: labels_T[t] is the token to predict at position t; -100 none

"""Room card.

Holds: every segment's flat buffers (w, lo, m, v, grad) at their homes, and the split/join rule of the masters.
Takes -> gives: layouts, precision and plan -> buffers and views; fp32 masters -> (w, lo) and back.
May touch: host and device memory through `memory`.
Must never: order work, wait on streams, own an offset (`models/layout.py` does).
"""

from megatrain.store.master import join_master, split_master
from megatrain.store.store import SegmentStore

__all__ = ["SegmentStore", "join_master", "split_master"]

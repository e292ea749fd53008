"""Room card.

Holds: every segment's flat buffers (w, state, grad), block inputs that wait in RAM, the masters' split/join rule.
Takes -> gives: layouts, precision and plan -> buffers and views; fp32 masters -> (w, lo) and back.
May touch: host and device memory through `memory`.
Must never: order work, wait on streams, own an offset (`models/layout.py` does).
"""

from megatrain.store.master import join_master, split_master
from megatrain.store.store import SegmentStore
from megatrain.store.waiting import WaitingInputs

__all__ = ["SegmentStore", "WaitingInputs", "join_master", "split_master"]

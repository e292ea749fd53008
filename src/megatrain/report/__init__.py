"""Room card of the report.

Holds:         what a run folder tells (`record.py`), charts as SVG (`charts.py`), the page, the model card.
Takes -> gives: a run folder -> one self-contained HTML page; facts of a checkpoint -> its model card.
May touch:     files of the run folder; it writes below `report/` alone.
Must never:    load a weight, import torch, fetch anything, run a script.
"""

from megatrain.report.card import Kind, card
from megatrain.report.page import page
from megatrain.report.record import SAMPLES, Record, Sample, best_step, read_metrics, read_record

__all__ = ["SAMPLES", "Kind", "Record", "Sample", "best_step", "card", "page", "read_metrics", "read_record"]

"""Room card of the report.

Holds:         what a run folder tells (`record.py`), line and bar charts as SVG (`charts.py`), the page (`page.py`).
Takes -> gives: a run folder -> one self-contained HTML page.
May touch:     files of the run folder; it writes below `report/` alone.
Must never:    load a weight, import torch, fetch anything, run a script.
"""

from megatrain.report.page import page
from megatrain.report.record import SAMPLES, Record, Sample, best_step, read_metrics, read_record

__all__ = ["SAMPLES", "Record", "Sample", "best_step", "page", "read_metrics", "read_record"]

"""Engine: runs a schedule.

Holds: the executor (a loop and a table), lanes, handlers, the places ops name, the chaos device, the trace.
Takes -> gives: (Schedule, templates, store, micro-batches) -> changed store, losses, norms, Trace.
May touch: devices, streams, threads, the segment store.
Must never: decide what runs when or where a byte lives, know a model's name.
"""

from megatrain.engine.engine import Engine, Numerics, StepResult

__all__ = ["Engine", "Numerics", "StepResult"]

"""Room card of training.

Holds:         the loop, the run folder and its lock, metrics, the live line, evaluation, resume, signals.
Takes -> gives: an engine, data and a resolved config -> a run folder with a trained model, metrics and checkpoints.
May touch:     the run folder, the terminal, signal handlers of the process.
Must never:    know a layer, a tier or a stream.
"""

from megatrain.train.keep import Keeper, refuse_other_run
from megatrain.train.loop import Checkpoints, Outcome, Run, Steps, train
from megatrain.train.run_folder import RunFolder
from megatrain.train.watch import Watch

__all__ = [
    "Checkpoints",
    "Keeper",
    "Outcome",
    "Run",
    "RunFolder",
    "Steps",
    "Watch",
    "refuse_other_run",
    "train",
]

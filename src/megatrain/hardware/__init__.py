"""Room card of the hardware.

Holds:         Machine (torch-free) and, in `probe.py`, the questions that fill it.
Takes -> gives: the machine under us -> a frozen Machine.
May touch:     /proc, the CUDA driver's figures, the free space of a folder.
Must never:    decide anything.
"""

from megatrain.hardware.machine import Machine

__all__ = ["Machine"]

"""Room card of the hardware.

Holds:         Machine and Measured (torch-free), what fills them, and the doctor's checks; torch only in `probe.py`.
Takes -> gives: the machine under us -> a frozen Machine; in more time, every rate of it, kept in a file.
May touch:     /proc, /sys, the GPU, a tenth of the RAM, a nameless file in the output folder, the cache folder.
Must never:    decide anything.
"""

from megatrain.hardware.machine import Machine

__all__ = ["Machine"]

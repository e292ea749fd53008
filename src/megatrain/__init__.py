"""MegaTrain: full-precision training of language models far larger than GPU memory.

Holds: the rooms of the program, in the order a run travels (docs/architecture.md).
Takes -> gives: nothing by itself; import the room you need.
May touch: nothing at import, so that `megatrain plan` starts without torch.
Must never: import a room here.
"""

__version__ = "0.1.0"

"""Room card of the command line.

Holds:         the verbs (`main.py`), what they print (`show.py`), and the wiring of all rooms (`assemble.py`).
Takes -> gives: words on the command line -> a run, a table or a file, and an exit code.
May touch:     everything; it is the only room that may import all others.
Must never:    compute.
"""

"""`python -m megatrain` is `megatrain`."""

from __future__ import annotations

from megatrain.cli.main import main

main()

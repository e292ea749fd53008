"""Benchmarks, one module each; `python -m bench NAME` runs one. Figures go to bench/results/, a JSON line each."""

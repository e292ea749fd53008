"""Ctrl-C during `make demo`: the training saves and ends by itself; the script around it waits."""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "demo"
# What a terminal does, one process after the other: both get the signal. The child is still at work when it comes.
TRAINING = """
import os, signal, sys, time
if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
    sys.exit("Ctrl-C would not reach the training")
os.kill(os.getppid(), signal.SIGINT)
time.sleep(1)
sys.exit(130)
"""


def test_the_script_waits_until_training_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DEMO)
    demo = importlib.import_module("run")
    before = signal.getsignal(signal.SIGINT)
    assert demo.exit_code_of([sys.executable, "-c", TRAINING]) == 130
    assert signal.getsignal(signal.SIGINT) is before

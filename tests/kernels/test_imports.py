"""The room loads on a machine without CUDA and without Triton."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_TRITON = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
import megatrain.kernels
print(megatrain.kernels.tensor_sums.__name__, "megatrain.kernels.triton_update" in sys.modules)
"""


def test_loads_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "tensor_sums False\n"), done.stderr

from __future__ import annotations

import importlib.util
import logging
import os
import threading
import time

import numpy as np
import pytest

from megatrain import optim
from megatrain.optim import native, spec
from tests.optim.values import same_bits, training_state

HYPER = optim.AdamW(learning_rate=3e-4, weight_decay=0.1)
needs_native = pytest.mark.skipif(not native.isas(), reason="installed without a C++ compiler")


@pytest.fixture
def without_native(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.mark.usefixtures("without_native")
def test_without_the_core_numpy_takes_over_and_says_so_once(caplog):
    w, m, v, grad = training_state(1000)
    expected = spec.adamw(w, m, v, grad, optim.scalars(HYPER, 1, 1.0), decay=True)
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        optim.update_fp32(w, m, v, grad, optim.scalars(HYPER, 1, 1.0), decay=True, threads=2)
        optim.tensor_sum_squares(grad)
    same_bits(w, expected[0])
    assert len(caplog.records) == 1
    assert "slower" in caplog.text
    with pytest.raises(ValueError, match="not installed"):
        optim.tensor_sum_squares(grad, isa="avx2")


def test_a_sanitized_core_is_the_one_under_test():
    """`make sanitize` says where its core is: an editable install elsewhere must not be tested in its place."""
    module = native.load()
    wanted = os.environ.get("MEGATRAIN_CORE_BELOW")
    if wanted is not None:
        assert module is not None
        assert str(module.__file__).startswith(wanted)


@needs_native
def test_the_instruction_sets_are_distinct_and_the_widest_is_the_default():
    names = native.isas()
    assert names[:2] == ["scalar", "baseline"]
    assert len(set(names)) == len(names)
    chosen = native.choose(None)
    assert chosen is not None
    assert chosen.isa == names[-1]


@needs_native
def test_the_update_lets_go_of_the_gil():
    spans = training_state(1 << 22)
    scalars = optim.scalars(HYPER, 1, 1.0)
    running = threading.Event()

    def work():
        running.set()
        for _ in range(5):
            optim.update_fp32(*spans, scalars, decay=True, threads=1, isa="scalar")

    worker = threading.Thread(target=work)
    worker.start()
    running.wait()
    ticks, start_s = 0, time.perf_counter()
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks >= 3, f"{ticks} ticks in {time.perf_counter() - start_s:.3f} s: the main thread was shut out"
    worker.join()


@needs_native
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_forked_child_can_update():
    w, m, v, grad = training_state(1 << 20)
    scalars = optim.scalars(HYPER, 1, 1.0)
    expected = spec.adamw(w, m, v, grad, scalars, decay=True)[0]
    optim.update_fp32(w.copy(), m.copy(), v.copy(), grad, scalars, decay=True, threads=3)
    child = os.fork()
    if child == 0:
        optim.update_fp32(w, m, v, grad, scalars, decay=True, threads=3)
        os._exit(0 if np.array_equal(w, expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@needs_native
def test_the_core_itself_refuses_spans_that_would_run_over():
    module = native.load()
    assert module is not None
    long, short = np.zeros(8, np.float32), np.zeros(7, np.float32)
    constants = np.ones(8, np.float32)
    with pytest.raises(ValueError, match="differ in length"):
        module.update_fp32(long, short, long.copy(), long.copy(), constants, 1, "scalar")
    with pytest.raises(ValueError, match="8 constants"):
        module.update_fp32(long, long.copy(), long.copy(), long.copy(), constants[:7], 1, "scalar")
    with pytest.raises(ValueError, match="do not divide"):
        module.tensor_sum_squares(long, 3, 1, "scalar")
    with pytest.raises(ValueError, match="not available"):
        module.tensor_sum_squares(long, 2, 1, "sse9")
    with pytest.raises(TypeError):
        module.update_fp32(long.astype(np.float64), long, long.copy(), long.copy(), constants, 1, "scalar")

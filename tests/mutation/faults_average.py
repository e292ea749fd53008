"""Faults in the running average of the masters."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

ENGINE = "tests/engine/test_average.py -k calm"
KERNEL = "tests/kernels/test_average.py"
RUNS = "tests/cli/test_average.py"

UPDATED = """\
        self._rule.update(layout, w, state, g, scalars)
"""
AVERAGED = """\
        masters, threads = w[: layout.num_trainable], 1 if w.is_cuda else self._threads
        kernels.average_(state["ema"], masters, state.get("lo"), self._share, threads=threads)
"""

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "engine/rules.py",
        ENGINE,
        ("the average is never updated", AVERAGED, ""),
        ("the average comes before the update", UPDATED + AVERAGED, AVERAGED + UPDATED),
        (
            "another decay",
            "self._share = optim.average_share(decay)",
            "self._share = optim.average_share(decay * decay)",
        ),
    ),
    *of(
        "engine/rules.py",
        "tests/engine/test_average.py -k frozen",
        ("the average of frozen tensors too", "masters, threads = w[: layout.num_trainable]", "masters, threads = w"),
    ),
    *of(
        "kernels/average.py",
        ENGINE,
        ("the average is of the compute weights", "join_master(w[cut], lo[cut])", "w[cut].float()"),
    ),
    *of(
        "kernels/average.py",
        KERNEL,
        (
            "only the first chunk is averaged",
            "range(first * size, ema.numel(), threads * size)",
            "range(first * size, min(size, ema.numel()), threads * size)",
        ),
        (
            "threads leave chunks out",
            "list(pool.map(every, range(threads)))",
            "list(pool.map(every, range(threads - 1)))",
        ),
        ("the average is fused", "part.add_(master.sub(part).mul_(share))", "part.add_(master.sub(part), alpha=share)"),
    ),
    *of(
        "optim/spec.py",
        KERNEL,
        ("the average's share is rounded twice", "return fp32(1.0 - decay)", "return fp32(1.0 - fp32(decay))"),
        ("the average's share is its decay", "return fp32(1.0 - decay)", "return fp32(decay)"),
    ),
    *of(
        "store/store.py",
        ENGINE,
        ("an average starts at zero", 'self.flat(segment, "ema")[where].copy_(values)', "pass"),
    ),
    *of(
        "checkpoint/state.py",
        RUNS,
        ("a begun average starts at zero", "    if unsaved:\n        start_averages(store)\n", ""),
        ("an average is not saved", "for kind in store.state_kinds if", "for kind in ('lo', 'm', 'v') if"),
        ("a dropped average is no part of the run", "if name.startswith(passed_over):", "if False:"),
    ),
    *of(
        "checkpoint/average.py",
        RUNS,
        ("a saved average starts anew", 'return KIND in checkpoint.manifest.get("state_kinds", ())', "return False"),
    ),
    *of("cli/export_run.py", RUNS, ("the last weights for the average", "take_averages(store)", "pass")),
)

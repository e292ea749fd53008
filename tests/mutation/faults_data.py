"""Faults in data, checkpoints and the loop."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

BATCHES = "tests/data/test_batches.py"
CHECKPOINT = "tests/checkpoint/test_checkpoint.py"

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "data/batches.py",
        BATCHES,
        ("labels not shifted", "np.where(trained, tokens[1:], IGNORED)", "np.where(trained, tokens[:-1], IGNORED)"),
        ("a target crosses a boundary", "labels_T[at:at + length - 1] =", "labels_T[at + 1:at + length] ="),
        ("documents share a number", "document_ids_T[at:at + length] = document", "document_ids_T[at:at + length] = 0"),
        (
            "positions run through",
            "position_ids_T[at:at + length] = np.arange(length)",
            "position_ids_T[at:at + length] = np.arange(at, at + length)",
        ),
        (
            "the trained mask one token off",
            "trained = dataset.trained(start + 1, start + length)",
            "trained = dataset.trained(start, start + length - 1)",
        ),
        (
            "every epoch in one order",
            "order = permutation(self._fixed.num_bins, seed, epoch)",
            "order = permutation(self._fixed.num_bins, seed, 0)",
        ),
        ("padding counted as tokens", "num_tokens=at,", "num_tokens=self._size,"),
    ),
    *of(
        "data/pack.py", BATCHES, ("bins over their capacity", "each = space // length ", "each = space // length + 1 ")
    ),
    *of(
        "checkpoint/state.py",
        CHECKPOINT,
        ("v is not saved", '_STATE_KINDS = ("lo", "m", "v")', '_STATE_KINDS = ("lo", "m")'),
    ),
    *of(
        "train/loop.py",
        "tests/train tests/cli/test_verbs.py",
        (
            "resume repeats a step",
            "for step in range(run.start_step + 1, run.num_steps + 1):",
            "for step in range(run.start_step or 1, run.num_steps + 1):",
        ),
    ),
)

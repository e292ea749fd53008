"""Faults in the engine."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

ENGINE = "tests/engine/test_identity.py -k smollm2-fp32"
ENGINE_BF16 = "tests/engine/test_identity.py -k smollm2-bf16"
FAULTS = "tests/engine/test_identity.py -k non_finite"

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "engine/handlers.py",
        ENGINE,
        (
            "gradients are not sent home",
            'copy_in_pieces(self.store.flat(op.segment, "grad"), self.places.flat(op.reads[0], op.segment))',
            "pass",
        ),
        (
            "weights are not fetched",
            'copy_in_pieces(self.places.flat(op.writes[0], op.segment), self.store.flat(op.segment, "w"))',
            "pass",
        ),
        ("gradient slots are not zeroed", "target.zero_()", "pass"),
        ("the tied sums are not added", ".add_(self.places.tied_grad())", ".add_(0)"),
        (
            "the update does nothing",
            'rule.update(layout, w, state.get("lo"), state["m"], state["v"], g, self.cell.scalars)',
            "pass",
        ),
        ("m and v are swapped", 'state["m"], state["v"], g', 'state["v"], state["m"], g'),
        ("a hidden gradient is not passed on", "dh.copy_(dx)", "pass"),
        (
            "norm without the last tensor",
            "norm = optim.total_norm([sums[name] for name in names])",
            "norm = optim.total_norm([sums[name] for name in names[:-1]])",
        ),
        (
            "the clip coefficient is always 1",
            "coefficient = optim.clip_coefficient(norm, self.step.max_norm)",
            "coefficient = 1.0",
        ),
    ),
    *of(
        "engine/handlers.py",
        FAULTS,
        ("a non-finite step is applied", "finite = bool(np.isfinite(norm) and np.isfinite(loss_sum))", "finite = True"),
        (
            "a bad tensor is not named",
            "bad = next((name for name in names if not np.isfinite(sums[name])), None)",
            "bad = None",
        ),
    ),
    *of(
        "engine/engine.py",
        ENGINE,
        (
            "mean of micro-batches instead of the step's tokens",
            "inv_denominator=1.0 / num_supervised",
            "inv_denominator=1.0 / (num_supervised + 1)",
        ),
        ("the step count does not advance", "self.applied_steps += applied", "self.applied_steps += 0"),
        ("a pending update is forgotten", "        self._pending = True\n", "        self._pending = False\n"),
    ),
    *of(
        "engine/places.py",
        "tests/engine -k (smollm2-three)or(places)or(chaos_changes_no_bit)",
        ("micro-batches share one slot", "micro_batch=place.micro_batch % self._round_micro_batches", "micro_batch=0"),
    ),
    *of(
        "engine/executor.py",
        "tests/engine/test_executor.py",
        ("lanes do not wait", "                token.issued.wait()\n", ""),
    ),
    *of(
        "engine/rules.py",
        ENGINE,
        (
            "decay on norms too",
            "optim.update_fp32(wn, mn, vn, gn, scalars, decay=span.decay",
            "optim.update_fp32(wn, mn, vn, gn, scalars, decay=True",
        ),
    ),
    *of(
        "engine/rules.py",
        ENGINE_BF16,
        (
            "only the first span is updated",
            "for span in layout.spans:\n            cut = slice(span.start, span.stop)\n            wn",
            "for span in layout.spans[:1]:\n            cut = slice(span.start, span.stop)\n            wn",
        ),
    ),
)

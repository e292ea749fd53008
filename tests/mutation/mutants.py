"""The list of faults. `old` stands exactly once in `file`; `new` takes its place; `tests` must then fail."""

from __future__ import annotations

from typing import NamedTuple

ENGINE = "tests/engine/test_identity.py -k smollm2-fp32"
KEPT = "tests/engine/test_identity.py -k (smollm2-kept)or(smollm2-three)"
ENGINE_BF16 = "tests/engine/test_identity.py -k smollm2-bf16"
FAULTS = "tests/engine/test_identity.py -k non_finite"
CHAOS = "tests/engine -k chaos_changes_no_bit"
SCHEDULE = "tests/schedule/test_build.py tests/schedule/test_check.py"
SIMULATE = "tests/schedule/test_simulate.py"
NORM = "tests/optim/test_norm.py"
ADAMW = "tests/optim/test_adamw.py tests/optim/test_native.py"
SPLIT = "tests/optim/test_split.py"
LR = "tests/optim/test_schedules.py"
BATCHES = "tests/data/test_batches.py"
RENDER = "tests/data/test_render.py"
ROWS = "tests/data/test_rows.py"
STORE = "tests/store"
CHECKPOINT = "tests/checkpoint/test_checkpoint.py"
ATTENTION = "tests/models/test_attention.py"
LOSS = "tests/models/test_loss.py"
TEMPLATE = "tests/models/test_template.py"
SPEC = "tests/models/test_spec_of.py"


class Mutant(NamedTuple):
    """One fault: `what` says it in words."""

    file: str
    what: str
    old: str
    new: str
    tests: str


def _of(file: str, tests: str, *faults: tuple[str, str, str]) -> list[Mutant]:
    return [Mutant(f"src/megatrain/{file}", what, old, new, tests) for what, old, new in faults]


MUTANTS: tuple[Mutant, ...] = (
    *_of(
        "schedule/waits.py",
        SCHEDULE,
        (
            "no wait for the writer of what is read",
            "        for place in op.reads:\n            if place in self._write:\n                yield",
            "        for place in op.reads:\n            if False:\n                yield",
        ),
        ("no wait for earlier readers", "yield from self._reads.get(place, {}).values()", "yield from ()"),
        ("implied waits are kept", "if lane == own or clock[lane] >= position[before]:", "if lane == own:"),
        (
            "the last needed wait is dropped",
            "waits.append(tuple(reversed(chosen)))",
            "waits.append(tuple(reversed(chosen[1:])))",
        ),
    ),
    *_of(
        "schedule/slots.py",
        SCHEDULE,
        ("the slot that is needed soonest is given away", "farthest = max(next_uses)", "farthest = min(next_uses)"),
        ("a slot in use may be given away", "if farthest <= self._ahead:", "if farthest < 0:"),
        ("gradient slots always the first", 'slot = Place("g", len(users) % num_slots)', 'slot = Place("g", 0)'),
        ("an incomplete sum is not sent home", 'return segment.grads == "pool" and self._rotates', "return False"),
    ),
    *_of(
        "schedule/build.py",
        SCHEDULE,
        ("the tied sums are not merged", "if visit.last_round and self.tied_grad:", "if False:"),
        (
            "norm in every round",
            "            if visit.last_round:\n                yield Op(Kind.NORM",
            "            if True:\n                yield Op(Kind.NORM",
        ),
        (
            "norm in the first round only",
            "            if visit.last_round:\n                yield Op(Kind.NORM",
            "            if visit.first_round:\n                yield Op(Kind.NORM",
        ),
        (
            "block gradients zeroed in every round",
            "        block, grad = visit.index - 1, self.grads[visit]\n        if visit.first_round:",
            "        block, grad = visit.index - 1, self.grads[visit]\n        if True:",
        ),
        (
            "the last micro-batch of a round is left out",
            "range(start, stop) for start, stop in pairwise(edges)",
            "range(start, max(start + 1, stop - 1)) for start, stop in pairwise(edges)",
        ),
        ("the embedding gets no backward", "if self.lowest == 0:", "if False:"),
    ),
    *_of(
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
    *_of(
        "engine/handlers.py",
        FAULTS,
        ("a non-finite step is applied", "finite = bool(np.isfinite(norm) and np.isfinite(loss_sum))", "finite = True"),
        (
            "a bad tensor is not named",
            "bad = next((name for name in names if not np.isfinite(sums[name])), None)",
            "bad = None",
        ),
    ),
    *_of(
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
    *_of(
        "engine/places.py",
        "tests/engine -k (smollm2-three)or(places)or(chaos_changes_no_bit)",
        ("micro-batches share one slot", "micro_batch=place.micro_batch % self._round_micro_batches", "micro_batch=0"),
    ),
    *_of(
        "engine/executor.py",
        "tests/engine/test_executor.py",
        ("lanes do not wait", "                token.issued.wait()\n", ""),
    ),
    *_of(
        "engine/rules.py",
        ENGINE,
        (
            "decay on norms too",
            "optim.update_fp32(wn, mn, vn, gn, scalars, decay=span.decay",
            "optim.update_fp32(wn, mn, vn, gn, scalars, decay=True",
        ),
    ),
    *_of(
        "engine/rules.py",
        ENGINE_BF16,
        (
            "only the first span is updated",
            "for span in layout.spans:\n            cut = slice(span.start, span.stop)\n            wn",
            "for span in layout.spans[:1]:\n            cut = slice(span.start, span.stop)\n            wn",
        ),
    ),
    *_of(
        "optim/spec.py",
        ADAMW,
        ("betas swapped", "lerp=fp32(1.0 - hyper.beta1)", "lerp=fp32(1.0 - hyper.beta2)"),
        ("second moment without the square", "v = v * beta2 + (g * square) * g", "v = v * beta2 + (g * square)"),
        ("no bias correction of v", "bias2_sqrt=fp32(math.sqrt(1.0 - hyper.beta2**step))", "bias2_sqrt=1.0"),
        ("epsilon inside the root", "d = np.sqrt(v) / bias2_sqrt + epsilon", "d = np.sqrt(v + epsilon) / bias2_sqrt"),
        (
            "decay after the step",
            "w = (w * decay_mul if decay else w) - (m * step_size) / d",
            "w = (w - (m * step_size) / d) * (decay_mul if decay else np.float32(1))",
        ),
        ("no clipping in the update", "g = grad * c", "g = grad * np.float32(1)"),
        (
            "decay not decoupled from the learning rate",
            "decay_mul=fp32(1.0 - hyper.learning_rate * hyper.weight_decay)",
            "decay_mul=fp32(1.0 - hyper.weight_decay)",
        ),
    ),
    *_of(
        "optim/spec.py",
        SPLIT,
        (
            "hi is cut off instead of rounded",
            "rounded = (bits + np.uint32(0x8000)) >> np.uint32(16)",
            "rounded = bits >> np.uint32(16)",
        ),
        (
            "lo without its sign",
            "bits = (hi.astype(np.uint32) << np.uint32(16)) + lo.astype(np.int32).view(np.uint32)",
            "bits = (hi.astype(np.uint32) << np.uint32(16)) + lo.view(np.uint16).astype(np.uint32)",
        ),
    ),
    *_of(
        "optim/spec.py",
        NORM,
        (
            "lanes added one after another",
            "        lanes = lanes[:, :half] + lanes[:, half:]",
            "        lanes = lanes[:, ::2] + lanes[:, 1::2]",
        ),
        (
            "squares in fp32",
            "leaves[start : start + 1024].astype(np.float64) ** 2",
            "(leaves[start : start + 1024] ** 2).astype(np.float64)",
        ),
    ),
    *_of(
        "optim/norm.py",
        NORM,
        ("no square root", "return math.sqrt(total)", "return total"),
        ("clipping above, not below", "return 1.0 if norm <= max_norm else", "return 1.0 if norm >= max_norm else"),
    ),
    *_of(
        "optim/schedules.py",
        LR,
        ("warm-up one step late", "share = step / schedule.warmup_steps", "share = (step + 1) / schedule.warmup_steps"),
        ("linear ends early", "(schedule.num_steps - step) / remaining", "(schedule.num_steps - step - 1) / remaining"),
        ("cosine over all steps", "(step - schedule.warmup_steps) / remaining", "step / remaining"),
    ),
    *_of(
        "models/layout.py",
        "tests/engine/test_identity.py -k frozen",
        ("decay of the first tensor for all", "if spans and spans[-1].decay == tensor.decay:", "if spans:"),
        ("state of frozen tensors counted", "        if not tensor.trainable:\n            continue\n", ""),
    ),
    *_of(
        "models/loss.py",
        ENGINE,
        (
            "only the last chunk's gradient counts",
            "            view.add_(gradient)",
            "            view.copy_(gradient)",
        ),
        (
            "the loss of the first chunk only",
            "        loss += chunk_loss.detach()",
            "        loss = chunk_loss.detach()",
        ),
    ),
    *_of(
        "models/grad.py",
        "tests/models/test_parity.py -k llama tests/models/test_template.py",
        (
            "gradients of a kept graph from the old weights",
            "kept.rebinding.w_now = w_now",
            "kept.rebinding.w_now = kept.rebinding.w_now or w_now",
        ),
        ("weights keep their own place in a kept graph", "if first <= start < stop:", "if False:"),
    ),
    *_of(
        "models/grad.py",
        ENGINE,
        (
            "the embedding's gradient is dropped",
            "    if not grads:\n        return\n    with",
            "    if True:\n        return\n    with",
        ),
    ),
    *_of(
        "models/attention_cpu.py",
        ATTENTION,
        ("window one token wider", "(age_BS >= window)", "(age_BS > window)"),
        ("tokens see their future", "age_BS[:, first - low :] < 0", "age_BS[:, first - low :] < -1"),
        (
            "documents see each other",
            "    _, lengths = torch.unique_consecutive(document_ids_T, return_counts=True)",
            "    lengths = torch.tensor([num_tokens])",
        ),
        ("no soft-cap in the backward", "ds_GRBS.mul_(slope_GRBS)", "pass"),
        ("delta left out", ".sub_(delta_GRN1[:, :, rows])", ""),
    ),
    *_of(
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
    *_of(
        "data/pack.py", BATCHES, ("bins over their capacity", "each = space // length ", "each = space // length + 1 ")
    ),
    *_of(
        "checkpoint/state.py",
        CHECKPOINT,
        ("v is not saved", '_STATE_KINDS = ("lo", "m", "v")', '_STATE_KINDS = ("lo", "m")'),
    ),
    *_of(
        "train/loop.py",
        "tests/train tests/cli/test_verbs.py",
        (
            "resume repeats a step",
            "for step in range(run.start_step + 1, run.num_steps + 1):",
            "for step in range(run.start_step or 1, run.num_steps + 1):",
        ),
    ),
)

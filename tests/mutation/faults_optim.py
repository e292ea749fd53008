"""Faults in the optimizer."""

from __future__ import annotations

from tests.mutation.mutant import Mutant, of

NORM = "tests/optim/test_norm.py"
ADAMW = "tests/optim/test_adamw.py tests/optim/test_native.py"
SPLIT = "tests/optim/test_split.py"
LR = "tests/optim/test_schedules.py"

MUTANTS: tuple[Mutant, ...] = (
    *of(
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
    *of(
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
    *of(
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
    *of(
        "optim/norm.py",
        NORM,
        ("no square root", "return math.sqrt(total)", "return total"),
        ("clipping above, not below", "return 1.0 if norm <= max_norm else", "return 1.0 if norm >= max_norm else"),
    ),
    *of(
        "optim/schedules.py",
        LR,
        ("warm-up one step late", "share = step / schedule.warmup_steps", "share = (step + 1) / schedule.warmup_steps"),
        ("linear ends early", "(schedule.num_steps - step) / remaining", "(schedule.num_steps - step - 1) / remaining"),
        ("cosine over all steps", "(step - schedule.warmup_steps) / remaining", "step / remaining"),
    ),
)

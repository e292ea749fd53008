"""Faults in the C++ core: each builds it anew, half a minute."""

from __future__ import annotations

from functools import partial

from tests.mutation.mutant import Mutant
from tests.mutation.mutant import of as of_any_device

of = partial(of_any_device, device="core")
ADAMW = "tests/optim/test_adamw.py tests/optim/test_threads.py"
SPLIT = "tests/optim/test_split.py tests/optim/test_adamw.py"
NORM = "tests/optim/test_norm.py tests/optim/test_threads.py"

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "csrc/kernels.cpp",
        ADAMW,
        ("the moment by another formula", "*m + (g - *m) * s.lerp", "*m * (1.0f - s.lerp) + g * s.lerp"),
        (
            "weight decay behind the step",
            "return w * s.decay_mul - (m1 * s.step_size) / d",
            "return (w - (m1 * s.step_size) / d) * s.decay_mul",
        ),
        ("the rest of a split update is left out", "count - whole, s);", "0, s);"),
    ),
    *of(
        "csrc/kernels.cpp",
        SPLIT,
        ("hi is cut off instead of rounded", "bits | 0x00400000u : bits + 0x8000u", "bits | 0x00400000u : bits"),
        ("a NaN master rounds to zero", "(is_nan ? bits | 0x00400000u : bits + 0x8000u)", "(bits + 0x8000u)"),
        ("lo without its sign", "static_cast<uint32_t>(static_cast<int32_t>(lo))", "static_cast<uint16_t>(lo)"),
    ),
    *of(
        "csrc/kernels.cpp",
        NORM,
        ("the rest of a leaf in one lane", "lanes[i - whole] += x * x;", "lanes[0] += x * x;"),
        (
            "a square in fp32",
            "      const double x = leaf[start + lane];\n      lanes[lane] += x * x;",
            "      const float x = leaf[start + lane];\n      lanes[lane] += x * x;",
        ),
    ),
    *of(
        "csrc/parallel.h",
        ADAMW,
        ("the last, short piece is left out", " + (count % piece != 0)", ""),
        ("pieces overlap by one", "const uint64_t begin = i * piece;", "const uint64_t begin = i ? i * piece - 1 : 0;"),
    ),
    *of(
        "CMakeLists.txt",
        ADAMW,
        (
            "multiply and add fused",
            "-fno-math-errno -ffp-contract=off -Wall",
            "-fno-math-errno -ffp-contract=fast -Wall",
        ),
    ),
)

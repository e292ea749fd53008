"""Faults that only a GPU shows: streams, copies, kernels. Each must die in seconds."""

from __future__ import annotations

from functools import partial

from tests.mutation.mutant import Mutant
from tests.mutation.mutant import of as of_any_device

of = partial(of_any_device, device="cuda")
LATE = "tests/gpu/test_quick_gpu.py -k late_lanes"
STEPS = "tests/gpu/test_quick_gpu.py -k two_steps"
UPDATE_FP32 = "tests/kernels/test_update.py -k (test_adamw_fp32)and(257)"
UPDATE_SPLIT = "tests/kernels/test_update.py -k (test_adamw_split)and(257)"
EQUALS = "tests/models/test_attention_triton.py::test_equals_the_cpu_operator"
CROSS_ENTROPY = "tests/models/test_cross_entropy_gpu.py -k (4096)or(columns)"

MUTANTS: tuple[Mutant, ...] = (
    *of(
        "engine/lanes.py",
        LATE,
        ("a stream does not wait for another", "            self.stream.wait_event(mark)", "            pass"),
        ("the host does not wait for a stream", "            mark.synchronize()", "            pass"),
        ("a program ends before its streams do", "        self.stream.synchronize()", "        return None"),
        ("marks are set on another stream", "event.record(self.stream)", "event.record(torch.cuda.default_stream())"),
        (
            "all lanes on one stream, waits on the others",
            "return torch.cuda.stream(self.stream)",
            "return nullcontext()",
        ),
    ),
    *of(
        "engine/executor.py",
        LATE,
        ("waits are not passed on to streams", "device.wait(marks[name])", "pass"),
    ),
    *of(
        "memory/pinned.py",
        STEPS,
        (
            "the first element stays at home",
            "for start in range(0, source.numel(), piece):",
            "for start in range(1, source.numel(), piece):",
        ),
    ),
    *of(
        "engine/rules.py",
        STEPS,
        (
            "decay on norms too, on the device",
            "kernels.adamw_split_(w[cut], lo[cut], m[cut], v[cut], g[cut], scalars, decay=span.decay)",
            "kernels.adamw_split_(w[cut], lo[cut], m[cut], v[cut], g[cut], scalars, decay=True)",
        ),
    ),
    *of(
        "kernels/update.py",
        UPDATE_FP32,
        ("multiply and add fused", "enable_fp_fusion=False", "enable_fp_fusion=True"),
    ),
    *of(
        "kernels/triton_update.py",
        UPDATE_FP32,
        ("an approximate division", "tl.div_rn(step_size * m_new, d)", "(step_size * m_new) / d"),
        ("an approximate root", "tl.sqrt_rn(v_new)", "tl.sqrt(v_new)"),
        ("the last element is left out", "    here = at < count\n", "    here = at < count - 1\n"),
        (
            "decay with the wrong sign",
            "        master = master * decay_mul\n",
            "        master = master * (2.0 - decay_mul)\n",
        ),
    ),
    *of(
        "kernels/triton_update.py",
        UPDATE_SPLIT,
        ("hi is cut off instead of rounded", "(bits + 0x8000) >> 16)", "bits >> 16)"),
        (
            "lo without its sign",
            ".to(tl.int32).to(tl.uint32, bitcast=True)",
            ".to(tl.uint16, bitcast=True).to(tl.uint32)",
        ),
        (
            "a NaN master rounds to Inf",
            "is_nan = (bits & 0x7FFFFFFF) > 0x7F800000",
            "is_nan = (bits & 0x7FFFFFFF) > 0x7FFFFFFF",
        ),
    ),
    *of(
        "kernels/triton_update.py",
        "tests/kernels/test_update.py -k sums",
        (
            "halves folded one short",
            "_fold(_fold(_fold(_fold(x, 128), 64), 32), 16)",
            "_fold(_fold(_fold(_fold(x, 128), 64), 32), 16) * 1.0000000001",
        ),
    ),
    *of(
        "models/attention_triton.py",
        f"{EQUALS}[packed-torch.bfloat16-False]",
        ("documents see each other", "< own\n", "< own - 1\n"),
        ("delta left out of dq", "        ds = p * (dp - delta[:, None])\n", "        ds = p * dp\n"),
    ),
    *of(
        "models/attention_triton.py",
        f"{EQUALS}[window-torch.bfloat16-False]",
        ("the first query head of a group counts for all", "head = group * R + member", "head = group * R"),
        ("window one token wider", "low = tl.maximum(low, t - window + 1)", "low = tl.maximum(low, t - window)"),
    ),
    *of(
        "models/attention_triton.py",
        f"{EQUALS}[softcap-torch.bfloat16-False]",
        (
            "no soft-cap",
            "    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2_E)) + 1.0)",
            "    return x",
        ),
    ),
    *of(
        "models/attention_triton.py",
        f"{EQUALS}[sinks-torch.bfloat16-False]",
        (
            "sinks have no weight",
            "total = tl.zeros([BLOCK_Q], tl.float32) + 1.0",
            "total = tl.zeros([BLOCK_Q], tl.float32)",
        ),
    ),
    *of(
        "models/cross_entropy_triton.py",
        CROSS_ENTROPY,
        ("the sum is not scaled to a new peak", "total = total * tl.exp(peak - higher) + ", "total = total + "),
        ("unlabelled rows have a gradient", "d = tl.where(label == IGNORED, 0.0, scale * p)", "d = scale * p"),
        ("the label's one is left out", "tl.where(at == label, 1.0 - smoothing, 0.0)", "0.0"),
    ),
)

"""The fused cross-entropy against its formula in fp64, and against the framework's own in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatrain.models.batch import IGNORED_LABEL
from megatrain.models.cross_entropy import token_losses

pytestmark = pytest.mark.gpu
C = 37


def setting(dtype: torch.dtype, num_columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with large offsets, first columns of -inf, a label at either end, and unlabelled rows, one of them NaN."""
    random = torch.Generator("cuda").manual_seed(num_columns)
    logits_CV = 4 * torch.randn(C, num_columns, device="cuda", generator=random)
    logits_CV += 30 * torch.randn(C, 1, device="cuda", generator=random)
    labels_C = torch.randint(0, num_columns, (C,), device="cuda", generator=random)
    labels_C[0], labels_C[1] = 0, num_columns - 1
    labels_C[3::5] = IGNORED_LABEL
    logits_CV[3] = float("nan")
    return logits_CV.to(dtype), labels_C, torch.rand(C, device="cuda", generator=random) + 0.5


def losses_and_gradient(function, logits_CV: Tensor, dloss_C: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits_CV.detach().clone().requires_grad_()  # a copy: ours gives the gradient in the place of the logits
    loss_C = function(leaf)
    (gradient,) = torch.autograd.grad(loss_C, leaf, dloss_C.to(loss_C.dtype))
    return loss_C.detach(), gradient


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_columns", [5, 4096, 50257, 128256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_as_exact_as_the_framework_and_repeatable(dtype: torch.dtype, num_columns: int, smoothing: float) -> None:
    logits_CV, labels_C, dloss_C = setting(dtype, num_columns)

    def framework(x: Tensor, wide: torch.dtype) -> Tensor:
        kwargs = {"ignore_index": IGNORED_LABEL, "reduction": "none", "label_smoothing": smoothing}
        return cross_entropy(x.to(wide), labels_C, **kwargs)

    ours = losses_and_gradient(lambda x: token_losses(x, labels_C, smoothing), logits_CV, dloss_C)
    again = losses_and_gradient(lambda x: token_losses(x, labels_C, smoothing), logits_CV, dloss_C)
    labelled = labels_C != IGNORED_LABEL
    eager = losses_and_gradient(lambda x: framework(x, torch.float32), logits_CV, dloss_C)
    exact = losses_and_gradient(lambda x: framework(x, torch.float64), logits_CV.double(), dloss_C)
    for name, mine, twice, theirs, true in zip(("loss", "gradient"), ours, again, eager, exact, strict=True):
        assert torch.equal(mine, twice), name
        assert (mine[~labelled] == 0).all(), name
        error, allowed = ((x[labelled].double() - true[labelled]).norm() for x in (mine, theirs))
        assert error <= 1.1 * allowed + 1e-6 * true[labelled].norm(), (name, float(error), float(allowed))


@pytest.mark.parametrize("label", [9000, -1])
def test_a_label_beyond_the_vocabulary_gives_a_nan(label: int) -> None:
    logits_CV, labels_C, _ = setting(torch.bfloat16, 9000)
    labels_C[1] = label
    loss_C = token_losses(logits_CV, labels_C, 0.0)
    assert loss_C[1].isnan()
    assert loss_C[0].isfinite()


def test_columns_that_cannot_be_have_no_share() -> None:
    logits_CV, labels_C, dloss_C = setting(torch.bfloat16, 9000)
    labels_C = labels_C.clamp_min(5000)
    impossible = logits_CV.clone()
    impossible[:, :4500] = -float("inf")
    loss_C, gradient = losses_and_gradient(lambda x: token_losses(x, labels_C, 0.0), impossible, dloss_C)
    want_C, want = losses_and_gradient(
        lambda x: token_losses(x, labels_C - 4500, 0.0), logits_CV[:, 4500:].contiguous(), dloss_C
    )
    rows = ~loss_C.isnan()
    assert rows.sum() == C - 1
    torch.testing.assert_close(loss_C[rows], want_C[rows], rtol=1e-6, atol=1e-6)
    assert (gradient[rows, :4500] == 0).all()
    torch.testing.assert_close(gradient[rows, 4500:], want[rows], rtol=1e-2, atol=1e-6)


def test_the_gradient_takes_the_place_of_the_logits() -> None:
    logits_CV, labels_C, _ = setting(torch.bfloat16, 9000)
    logits_CV.requires_grad_()
    loss = token_losses(logits_CV, labels_C, 0.0)[:1].sum()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    (gradient,) = torch.autograd.grad(loss, logits_CV)
    assert gradient.data_ptr() == logits_CV.data_ptr()
    assert torch.cuda.max_memory_allocated() - before < logits_CV.numel()  # half a copy of them


def test_logits_that_another_operator_saved_are_not_overwritten_unseen() -> None:
    logits_CV, labels_C, _ = setting(torch.bfloat16, 9000)
    leaf = logits_CV.requires_grad_()
    loss_C = token_losses(leaf.tanh(), labels_C, 0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss_C[1], leaf)

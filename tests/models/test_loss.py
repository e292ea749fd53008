"""The chunked loss against its formula written out in fp64."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.models.loss import chunked_backward

T, D, V = 13, 8, 32


def product(w: Mapping[str, Tensor], y_1CD: Tensor) -> Tensor:
    return y_1CD @ w["out"].T


def setting(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    y_1TD = torch.randn(1, T, D, generator=random).to(dtype)
    w_VD = torch.randn(V, D, generator=random).to(dtype)
    labels_T = torch.randint(0, V, (T,), generator=random)
    labels_T[[0, 5, 6, 7, 12]] = -100
    return y_1TD, w_VD, labels_T


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 13, 100])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=["fp32", "bf16"])
def test_loss_and_gradients(dtype: torch.dtype, rtol: float, chunk_tokens: int) -> None:
    y_1TD, w_VD, labels_T = setting(dtype)
    dw_VD = torch.full((V, D), 0.5)
    loss, dy_1TD = chunked_backward(product, {"out": w_VD}, {"out": dw_VD}, y_1TD, labels_T, 0.125, chunk_tokens)

    wide_y, wide_w = y_1TD[0].double().requires_grad_(), w_VD.double().requires_grad_()
    logits_TV = wide_y @ wide_w.T
    chosen = labels_T >= 0
    expected = (logits_TV.logsumexp(1) - logits_TV.gather(1, labels_T.clamp_min(0)[:, None])[:, 0])[chosen].sum()
    dy, dw = torch.autograd.grad(0.125 * expected, [wide_y, wide_w])
    assert loss.dtype == torch.float64
    assert dy_1TD.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=rtol / 10, atol=0)
    torch.testing.assert_close(dy_1TD[0].double(), dy, rtol=rtol, atol=rtol / 10)
    torch.testing.assert_close(dw_VD.double() - 0.5, dw, rtol=rtol, atol=rtol / 10)


def test_softmax_is_in_fp32_and_the_sum_in_fp64() -> None:
    """The loss of bf16 logits is that of the same numbers in fp32, exactly, each token's widened before the sum."""
    y_1TD, w_VD, labels_T = setting(torch.bfloat16)
    loss, _ = chunked_backward(product, {"out": w_VD}, {}, y_1TD, labels_T, 1.0, T)
    log_p = torch.log_softmax(product({"out": w_VD}, y_1TD)[0].float(), dim=1)
    tokens = [-log_p[t, label].double() for t, label in enumerate(labels_T) if label >= 0]
    assert float(loss) == pytest.approx(float(sum(tokens)), rel=1e-14)
    assert loss != loss.float().double(), "the sum must need more than fp32 here"


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_smoothing_spreads_a_part_of_each_target_over_the_vocabulary(smoothing: float) -> None:
    y_1TD, w_VD, labels_T = setting(torch.float32)
    dw_VD = torch.zeros(V, D)
    loss, dy_1TD = chunked_backward(product, {"out": w_VD}, {"out": dw_VD}, y_1TD, labels_T, 0.125, 5, smoothing)

    wide_y, wide_w = y_1TD[0].double().requires_grad_(), w_VD.double().requires_grad_()
    log_p_TV = torch.log_softmax(wide_y @ wide_w.T, dim=1)
    target_TV = torch.nn.functional.one_hot(labels_T.clamp_min(0), V) * (1 - smoothing) + smoothing / V
    expected = -(log_p_TV * target_TV)[labels_T >= 0].sum()
    dy, dw = torch.autograd.grad(0.125 * expected, [wide_y, wide_w])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(dy_1TD[0].double(), dy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dw_VD.double(), dw, rtol=1e-5, atol=1e-6)


def test_no_labels_no_loss() -> None:
    y_1TD, w_VD, labels_T = setting(torch.float32)
    dw_VD = torch.zeros(V, D)
    loss, dy_1TD = chunked_backward(
        product, {"out": w_VD}, {"out": dw_VD}, y_1TD, torch.full_like(labels_T, -100), 1.0, 4
    )
    assert loss == 0
    assert not dy_1TD.any()
    assert not dw_VD.any()


def test_what_a_chunk_made_is_gone_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second dW took 1 GB of HBM beside a vocabulary of 128K."""
    y_1TD, w_VD, labels_T = setting(torch.float32)
    made: list[weakref.ref[Tensor]] = []
    real = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        assert [ref() for ref in made] == [None] * len(made)
        found = real(*args, **kwargs)
        made.extend(map(weakref.ref, found))
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    chunked_backward(product, {"out": w_VD}, {"out": torch.zeros_like(w_VD)}, y_1TD, labels_T, 1.0, 5)
    assert len(made) >= 4

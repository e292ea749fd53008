"""Our step against torch's, elementwise and per step: torch starts every step from our state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatrain import optim
from tests.optim.values import training_state


def ulps(difference, scale):
    """|difference| in units of the last place of `scale`."""
    return np.abs(difference.astype(np.float64)) / np.spacing(np.abs(scale).astype(np.float32)).astype(np.float64)


def torch_step(w, m, v, grad, hyper, step, fused):
    parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
    parameter.grad = torch.from_numpy(grad.copy())
    other = torch.optim.AdamW(
        [parameter],
        lr=hyper.learning_rate,
        betas=(hyper.beta1, hyper.beta2),
        eps=hyper.epsilon,
        weight_decay=hyper.weight_decay,
        fused=fused,
        foreach=False,
    )
    other.state[parameter] = {
        "step": torch.tensor(float(step - 1)),
        "exp_avg": torch.from_numpy(m.copy()),
        "exp_avg_sq": torch.from_numpy(v.copy()),
    }
    other.step()
    state = other.state[parameter]
    return parameter.detach().numpy(), state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_every_step_within_the_stated_ulps(fused, weight_decay):
    hyper = optim.AdamW(learning_rate=3e-3, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=weight_decay)
    w, m, v, _ = training_state(5000)
    m[:], v[:] = 0.0, 0.0
    for step in range(1, 31):
        grad = training_state(5000, step)[3]
        scalars = optim.scalars(hyper, step, 1.0)
        w0, m0, v0 = w.copy(), m.copy(), v.copy()
        w_torch, m_torch, v_torch = torch_step(w, m, v, grad, hyper, step, fused)
        optim.update_fp32(w, m, v, grad, scalars, decay=True, threads=1)
        assert not np.array_equal(w, w0)
        assert ulps(v - v_torch, v).max() <= 1
        m_term = np.maximum(np.abs(m0), np.abs((grad - m0) * np.float32(scalars.lerp)))
        assert ulps(m - m_torch, m_term).max() <= 2
        w_term = np.maximum(np.abs(w0 * np.float32(scalars.decay_mul)), np.abs(w - w0))
        assert ulps(w - w_torch, w_term).max() <= 16
        assert not np.array_equal(v, v0)

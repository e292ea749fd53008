"""What the framework's matrix products work in is taken once, before a step: not amid what comes and goes."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.lanes import lane_devices, take_workspaces
from megatrain.schedule.ops import Lane

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_first_product_and_its_backward_take_nothing_for_good(has_bias: bool) -> None:
    device = torch.device("cuda")
    compute = lane_devices(device)[Lane.COMPUTE]
    take_workspaces(compute, device)
    layer = torch.nn.Linear(1024, 4096, bias=has_bias, device=device, dtype=torch.bfloat16)
    x = torch.randn(2048, 1024, device=device, dtype=torch.bfloat16)
    layer(x).sum().backward()  # on another stream: gradients are there, and kernels loaded
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with compute.context():
        layer(x).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before

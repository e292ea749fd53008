"""Rates: how fast the parts of a machine are, as the planner's cost model needs them. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from megatrain.hardware.machine import DeviceKind, Machine, Rate, RateOr0
from megatrain.hardware.measured import Measured


@dataclass(frozen=True)
class Rates:
    """Sustained rates, each of one thing that has the machine to itself, and what is shared.

    `matmul`, `attention`: of large products and of causal attention's forward, in the compute dtype. `link_both_Bps`:
    both directions together. `dram_Bps`: all traffic of host memory, DMA too. `update`: parameters a second of the CPU
    AdamW. `scale`: kind of op -> measured seconds ÷ modelled ones, from a trace. A disk rate of 0: unknown.
    """

    source: str  # "measured by megatrain doctor", "described", …
    matmul_flops_per_s: Rate
    attention_flops_per_s: Rate
    hbm_Bps: Rate
    h2d_Bps: Rate
    d2h_Bps: Rate
    link_both_Bps: Rate
    dram_Bps: Rate
    update_params_per_s: Rate
    disk_read_Bps: RateOr0
    disk_write_Bps: RateOr0
    op_s: Rate = 5e-5  # of starting one op
    step_s: Rate = 5e-3  # between two steps: data, counters, a line of the log
    scale: Mapping[str, Rate] = field(default_factory=dict)


ATTENTION_SHARE = 0.57  # of the matmul rate, where attention was not measured: 450 of 785 TFLOP/s on an H200
# A GPU in a step against the same kernel in an endless row, on an H200: products run faster where attention and
# elementwise work let a chip at its power limit rest (785 for 659 TFLOP/s), and elementwise kernels of a layer do not
# reach the bandwidth of one long sum (3.8 for 4.33 TB/s).
PRODUCTS_IN_STEP, HBM_IN_STEP = 1.19, 0.88
# Host memory carries more than an update alone asks of it (28 bytes a parameter): with this, and at 1.1 of doctor's
# rate (planner/costs.py UPDATE_SHARE), updates of 37 plans beside copies took 0.74 to 1.22 of what is modelled. With
# 1.3 the 5.7 % that updates saved by passing through a GPU would be 2 % (docs/planning.md).
DRAM_BESIDE_UPDATE = 1.45

# When nothing was measured: modest figures, which a plan names as assumed.
ASSUMED: Mapping[DeviceKind, Rates] = {
    "cuda": Rates("assumed; `megatrain doctor` measures them", 1.5e14, 7e13, 9e11, 2.2e10, 2.2e10, 4e10, 5e10, 1.2e9,
                  1.5e9, 1e9),
    "cpu": Rates("assumed; `megatrain doctor` measures them", 2e11, 1e11, 4e10, 2e10, 2e10, 2e10, 4e10, 1e9, 1e9, 1e9),
}  # fmt: skip


def rates_of(measured: Measured) -> Rates:
    """The rates that `megatrain doctor` took; what it could not take is assumed."""
    device: DeviceKind = "cpu" if measured.gpu is None else "cuda"
    rates = replace(ASSUMED[device], source="measured by megatrain doctor")
    matmul = measured.matmul_flops_per_s.get("bf16" if device == "cuda" else "fp32")
    if matmul:
        matmul *= PRODUCTS_IN_STEP if device == "cuda" else 1.0
        rates = replace(rates, matmul_flops_per_s=matmul, attention_flops_per_s=matmul * ATTENTION_SHARE)
    if measured.attention_flops_per_s:
        rates = replace(rates, attention_flops_per_s=measured.attention_flops_per_s)
    if measured.hbm_Bps:
        rates = replace(rates, hbm_Bps=HBM_IN_STEP * measured.hbm_Bps)
    if measured.update_params_per_s:
        rates = replace(rates, update_params_per_s=measured.update_params_per_s)
    if measured.dram_copy_Bps:
        updates_Bps = 28 * rates.update_params_per_s * (DRAM_BESIDE_UPDATE if device == "cuda" else 1.0)
        rates = replace(rates, dram_Bps=max(measured.dram_copy_Bps, updates_Bps))
    if measured.link is not None:
        link = measured.link
        both = link.both_h2d_Bps + link.both_d2h_Bps
        rates = replace(rates, h2d_Bps=link.h2d_Bps, d2h_Bps=link.d2h_Bps, link_both_Bps=both)
    elif device == "cpu":
        copy_Bps = rates.dram_Bps / 2  # slots are host memory too: a copy reads and writes
        rates = replace(rates, hbm_Bps=rates.dram_Bps, h2d_Bps=copy_Bps, d2h_Bps=copy_Bps, link_both_Bps=copy_Bps)
    if measured.disk is not None:
        rates = replace(rates, disk_read_Bps=measured.disk.read_Bps, disk_write_Bps=measured.disk.write_Bps)
    return rates


def machine_of(measured: Measured) -> Machine:
    """The machine that was measured, as it was then."""
    host, gpu = measured.host, measured.gpu
    return Machine(
        device="cpu" if gpu is None else "cuda",
        device_name=host.processor if gpu is None else gpu.name,
        hbm_total_bytes=0 if gpu is None else gpu.hbm_total_bytes,
        hbm_free_bytes=0 if gpu is None else gpu.hbm_free_bytes,
        ram_total_bytes=host.ram_total_bytes,
        ram_available_bytes=host.ram_available_bytes,
        disk_free_bytes=0 if measured.disk is None else measured.disk.free_bytes,
        num_cores=host.num_cores,
        isa=host.isa,
    )

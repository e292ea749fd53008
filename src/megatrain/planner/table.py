"""MemoryTable: where every byte of a run will be, by component and tier, and whether that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from megatrain.config_values import UNITS_BYTES, format_size
from megatrain.schedule.plan import Tier

Verdict = Literal["FITS", "TIGHT", "NO"]
TIERS: tuple[Tier, ...] = ("hbm", "ram", "disk")
# What of a budget is not planned with. RAM and disk: other programs, the page cache and what a library may need are
# beside it. HBM is the run's alone and the account is good to 2 %, but pieces of the pool that fit nothing are as large
# in a small budget as in a large one: with 250 MiB to spare of 8 and 12 GiB, an H200 ran out of them.
SPARE_SHARE, LARGE_HBM_SPARE_SHARE, HBM_SPARE_BYTES = 0.05, 0.015, 384 << 20


def spare_bytes(tier: Tier, budget_bytes: int) -> float:
    """What of a budget is left to what nobody counts."""
    share = SPARE_SHARE * budget_bytes
    return max(LARGE_HBM_SPARE_SHARE * budget_bytes, min(share, HBM_SPARE_BYTES)) if tier == "hbm" else share


class MemoryRow(NamedTuple):
    """`num_bytes` of `component` at the peak, in one tier."""

    component: str
    tier: Tier
    num_bytes: int


@dataclass(frozen=True)
class MemoryTable:
    """Peak bytes of a run. `budgets` holds what each tier may hold; `peak` names the phase that needs most."""

    rows: tuple[MemoryRow, ...]
    budgets: Mapping[Tier, int]
    peak: str
    num_parameters: int

    @cached_property
    def _totals(self) -> Mapping[Tier, int]:
        totals = dict.fromkeys(TIERS, 0)
        for row in self.rows:
            totals[row.tier] += row.num_bytes
        return totals

    def total_bytes(self, tier: Tier) -> int:
        """Bytes planned in `tier`."""
        return self._totals[tier]

    def room_bytes(self, tier: Tier, *, spare: bool = True) -> float:
        """What is left of `tier` beside what should be to spare; below 0: more than a run may be planned with."""
        budget = self.budgets[tier]
        return budget - (spare_bytes(tier, budget) if spare else 0) - self.total_bytes(tier)

    def verdict(self, tier: Tier) -> Verdict:
        """Whether `tier` holds its rows. TIGHT: it does, with less to spare than a run may be planned with."""
        if self.total_bytes(tier) > self.budgets[tier]:
            return "NO"
        return "TIGHT" if self.room_bytes(tier) < 0 else "FITS"

    @property
    def overall(self) -> Verdict:
        """The worst verdict of all tiers."""
        verdicts = [self.verdict(tier) for tier in TIERS]
        return "NO" if "NO" in verdicts else "TIGHT" if "TIGHT" in verdicts else "FITS"

    @property
    def fullest(self) -> float:
        """The largest share of its budget that any tier needs; above 1 it does not fit."""
        return max(self.total_bytes(t) / max(1, self.budgets[t]) for t in TIERS)

    def lines(self) -> list[str]:
        """The table as text, one line a row, with bytes per parameter."""
        text = [f"{'component':<44}{'tier':<6}{'size':>11}  {'bytes/parameter':>15}"]
        for row in sorted(self.rows, key=lambda row: TIERS.index(row.tier)):
            share = row.num_bytes / self.num_parameters
            text.append(f"{row.component:<44}{row.tier:<6}{gib(row.num_bytes):>11}  {share:>15.2f}")
        for tier in TIERS:
            total, budget = self.total_bytes(tier), self.budgets[tier]
            if total or budget:
                text.append(f"{'total':<44}{tier:<6}{gib(total):>11}  of {gib(budget)}: {self.verdict(tier)}")
        text.append(f"peak phase: {self.peak}")
        return text


def figure(value: float) -> str:
    """Human number with three digits that say something, or all before the point: "0.00456", "16.2", "1,472"."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def decimal(num_bytes: float) -> str:
    """Human size in the units that drives are sold and rated in: "283 MB", "1,472 TB"."""
    for unit in ("TB", "GB", "MB", "KB"):
        if num_bytes >= UNITS_BYTES[unit]:
            return f"{figure(num_bytes / UNITS_BYTES[unit])} {unit}"
    return f"{num_bytes:.0f} B"


def clock(seconds: float) -> str:
    """ "1:02:03", days in front where there are any."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    return f"{f'{days:,} d ' if days else ''}{hours}:{minutes:02}:{whole % 60:02}"


def gib(num_bytes: int) -> str:
    """Human size: "1.25 GiB"; exact below a KiB."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return format_size(num_bytes)

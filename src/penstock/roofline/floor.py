"""The least time that a cost takes on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.hardware import AnyPeaks
from penstock.roofline.counts import Cost, OpCost

Bound = Literal["memory", "compute"]


@dataclass(slots=True)
class Floor:
    """Both terms of the least time, in seconds: the longer binds."""

    memory_s: float  # to move the bytes
    compute_s: float  # to multiply

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> Bound:
        return "memory" if self.memory_s >= self.compute_s else "compute"


def floor_of(cost: Cost, peaks: AnyPeaks) -> Floor:
    """A step's floor: each kind of product at its own peak, all bytes at the read bandwidth."""
    compute = 0.0
    for kind, flops in cost.products.items():
        compute += flops / peaks.of(kind)
    return Floor(cost.bytes_moved / peaks.read_bytes_per_s, compute)


def op_floor(row: OpCost, peaks: AnyPeaks) -> Floor:
    """An operator's floor; what isn't a product runs at the float32 peak."""
    peak = peaks.of("float32" if row.unit == "vector" else row.unit)
    return Floor(row.bytes_moved / peaks.read_bytes_per_s, row.flops / peak)


def floor_s(cost: Cost, peaks: AnyPeaks) -> float:
    """The least time, in seconds."""
    return floor_of(cost, peaks).seconds

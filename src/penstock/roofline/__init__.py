"""How full the pipe runs: what a step must cost on this machine, and what it did cost."""

from penstock.roofline.cost import OPS, CostModel
from penstock.roofline.counts import Cost, OpCost, StepSize, total
from penstock.roofline.floor import Bound, Floor, floor_of, floor_s, op_floor
from penstock.roofline.gpu_peaks import (
    gpu_peaks,
    kept_gpu_peaks,
    kept_peaks_on,
    measure_gpu,
    measure_on,
    peaks_on,
)
from penstock.roofline.ledger import CAUSES, Ledger, StepRecord, Totals
from penstock.roofline.peaks import kept_peaks, measure, peaks, peaks_now

__all__ = [
    "CAUSES",
    "OPS",
    "Bound",
    "Cost",
    "CostModel",
    "Floor",
    "Ledger",
    "OpCost",
    "StepRecord",
    "StepSize",
    "Totals",
    "floor_of",
    "floor_s",
    "gpu_peaks",
    "kept_gpu_peaks",
    "kept_peaks",
    "kept_peaks_on",
    "measure",
    "measure_gpu",
    "measure_on",
    "op_floor",
    "peaks",
    "peaks_now",
    "peaks_on",
    "total",
]

"""From the magnitudes that a calibration run saw to one scale: where to cut them off.

Sources: min-max, percentile and squared error: Nagel et al. 2021, arXiv:2106.08295, section 3.1;
entropy: Migacz 2017, "8-bit inference with TensorRT", GTC 2017.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from penstock.errors import ConfigError

Calibrator = Literal["minmax", "percentile", "entropy", "mse"]
CALIBRATORS: tuple[Calibrator, ...] = ("minmax", "percentile", "entropy", "mse")

Rounded = Literal["int8", "fp8"]
"""What activations become."""
LARGEST: dict[Rounded, int] = {"int8": 127, "fp8": 448}

BINS = 2048
LEVELS = 128
"""Magnitudes of int8: 0 … 127."""


class Histogram:
    """Counts of |x| in BINS bins of equal width from 0.

    Where a larger value comes, the width doubles and bins are added up in pairs: counts stay exact,
    and what is found doesn't depend on the order in which values came, but for the first batch's
    width.
    """

    def __init__(self) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int64)
        self.width = 0.0
        self.largest = 0.0

    def add(self, magnitudes: Tensor) -> None:
        """Count |x|, any shape, finite."""
        top = float(magnitudes.max()) if magnitudes.numel() else 0.0
        self.largest = max(self.largest, top)
        if top > 0 and self.width == 0:
            self.width = top / BINS  # what was there before was zero, and lies in the first bin
        while top > self.width * BINS * (1 + 1e-6):
            pairs = self.counts.view(-1, 2).sum(1)
            self.counts = torch.cat((pairs, torch.zeros_like(pairs)))
            self.width *= 2
        if self.width == 0:
            self.counts[0] += magnitudes.numel()
            return
        at = (magnitudes.flatten() / self.width).long().clamp_(max=BINS - 1)
        self.counts += torch.bincount(at, minlength=BINS)


def check_calibrator(calibrator: str, rounded: Rounded) -> None:
    """Raise ConfigError where `calibrator` is none, or none of activations in `rounded`."""
    if calibrator not in CALIBRATORS:
        raise ConfigError(f"calibrator={calibrator!r} isn't one of {', '.join(CALIBRATORS)}.")
    if calibrator == "entropy" and rounded == "fp8":
        raise ConfigError(
            "calibrator='entropy' compares distributions over equal steps, which E4M3 doesn't "
            "have. Of activations in fp8 minmax, percentile and mse find a scale."
        )


def input_scale(
    histogram: Histogram,
    calibrator: Calibrator,
    percentile: float = 99.99,
    rounded: Rounded = "int8",
) -> float:
    """x ≈ q · scale for q within LARGEST[rounded]: where magnitudes are cut off, over that.

    minmax: nowhere. percentile: where that share of them lies below. entropy (of int8): where the
    distribution of what remains, in 128 levels, diverges least from the one before. mse: where the
    squared error of rounding and clipping is least.
    Raises ConfigError where nothing but zeros was seen.
    """
    check_calibrator(calibrator, rounded)
    if histogram.largest == 0:
        raise ConfigError(
            "Every calibration activation of a matrix is zero: no static scale follows from them. "
            "Use other text, or activations rounded token by token (w8a8, fp8-w8a8)."
        )
    match calibrator:
        case "minmax":
            cut = histogram.largest
        case "percentile":
            cut = _percentile(histogram, percentile)
        case "entropy":
            cut = _entropy(histogram)
        case "mse":
            cut = _least_squares(histogram, rounded)
    return min(cut, histogram.largest) / LARGEST[rounded]


def _percentile(histogram: Histogram, percentile: float) -> float:
    if not 0 < percentile <= 100:
        raise ConfigError(f"percentile={percentile} isn't above 0 and at most 100.")
    share = histogram.counts.cumsum(0).double() / histogram.counts.sum()
    at = int(torch.searchsorted(share, percentile / 100 - 1e-12))
    return (min(at, BINS - 1) + 1) * histogram.width


def _entropy(histogram: Histogram) -> float:
    """Bins 0 … n against the same in LEVELS steps, for each n; zeros stay zeros in both."""
    counts = histogram.counts.double()
    counts[0] = counts[1]  # exact zeros are exact in any scale, and would outweigh the rest
    last = int(counts.nonzero().max()) + 1
    best, cut = torch.inf, last
    for size in range(LEVELS, last + 1):
        kept = counts[:size].clone()
        kept[-1] += counts[size:].sum()
        found = _divergence(kept, counts[:size])
        if found < best:
            best, cut = found, size
    return cut * histogram.width


def _divergence(reference: Tensor, inside: Tensor) -> float:
    """KL of [n] counts from the same spread evenly over each of LEVELS steps' used bins."""
    step = torch.arange(len(inside)) * LEVELS // len(inside)
    used = inside > 0
    total = torch.zeros(LEVELS, dtype=torch.float64).index_add_(0, step, inside)
    width = torch.zeros(LEVELS, dtype=torch.float64).index_add_(0, step, used.double())
    spread = torch.where(used, (total / width.clamp(min=1))[step], 0.0)
    p, q = reference / reference.sum(), spread / spread.sum().clamp(min=1e-300)
    here = p > 0
    return float((p[here] * (p[here].log() - q[here].clamp(min=1e-12).log())).sum())


def _least_squares(histogram: Histogram, rounded: Rounded) -> float:
    """Over 200 cuts: bins stand for their middles; rounding within a step is uniform."""
    counts = histogram.counts.double()
    middle = (torch.arange(BINS, dtype=torch.float64) + 0.5) * histogram.width
    best, cut = torch.inf, histogram.largest
    for i in range(20, 201):
        top = histogram.largest * i / 200
        step = top / LARGEST[rounded]
        q = (middle / step).clamp(max=LARGEST[rounded])
        q = q.round() if rounded == "int8" else q.to(torch.float8_e4m3fn).double()
        error = float((counts * (middle - q * step) ** 2).sum())
        if error < best:
            best, cut = error, top
    return cut

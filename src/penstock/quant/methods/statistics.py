"""What a calibration run keeps of a matrix's inputs: enough for every method, whatever its length.

The squared error of a product is a quadratic form of the weights' error: for X of T rows,
‖X·Δᵀ‖² = tr(Δ·(XᵀX)·Δᵀ). So XᵀX replaces the inputs themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.quant.methods.calibrate import Histogram


class InputStatistics:
    """Sums over rows x [T, K] of one matrix's inputs."""

    def __init__(self, in_features: int, *, hessian: bool = True, histogram: bool = False) -> None:
        self.rows = 0
        self.max_abs = torch.zeros(in_features)
        """[K] float32, the largest |x| of each column."""
        self.histogram = Histogram() if histogram else None
        """Of |x|, all columns together, where it was asked for."""
        self._sum_abs = torch.zeros(in_features)
        self._products = torch.zeros(in_features, in_features) if hessian else None

    def add(self, x: Tensor) -> None:
        """Take rows x [T, K], any float dtype."""
        x = x.float()
        if not bool(x.isfinite().all()):
            raise WeightsError(
                f"{int((~x.isfinite()).sum())} of {x.numel()} calibration activations are NaN or "
                "infinite: the model overflows on this text, or a weight before it is damaged."
            )
        self.rows += x.shape[0]
        size = x.abs()
        self.max_abs = torch.maximum(self.max_abs, size.amax(0))
        self._sum_abs += size.sum(0)
        if self._products is not None:
            self._products.addmm_(x.t(), x)
        if self.histogram is not None:
            self.histogram.add(size)

    @property
    def mean_abs(self) -> Tensor:
        """[K] float32, the mean |x| of each column."""
        return self._sum_abs / max(self.rows, 1)

    @property
    def hessian(self) -> Tensor:
        """[K, K] float32: XᵀX / T, half the Hessian of the mean squared error in one row of W."""
        if self._products is None:
            raise WeightsError("These statistics were kept without XᵀX: ask for hessian=True.")
        return self._products / max(self.rows, 1)


def output_error(delta: Tensor, hessian: Tensor) -> float:
    """Mean over rows x of ‖x·Δᵀ‖²: delta [N, K], hessian [K, K] = XᵀX / T."""
    return float(((delta @ hessian) * delta).sum(dtype=torch.float64))

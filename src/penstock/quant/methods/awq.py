"""AWQ: columns whose inputs are large are scaled up before rounding, and their inputs down.

Source: Lin et al. 2023, arXiv:2306.00978; the two forms of scales are its code's (`duo_scaling`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.quant.methods import rtn
from penstock.quant.methods.statistics import output_error
from penstock.quant.scheme import Scheme


@dataclass(frozen=True, slots=True)
class AwqOptions:
    """How AWQ searches."""

    grid: int = 20  # exponents from 0 to 1
    rows: int = 512  # of each matrix that the search looks at, evenly spread
    clip: bool = True  # and then draws in the ends of groups (`methods.clip`)

    def __post_init__(self) -> None:
        if self.grid < 1 or self.rows < 1:
            raise ConfigError(f"AWQ with grid={self.grid}, rows={self.rows}: both are at least 1.")


def search_scales(
    weights: Sequence[Tensor],
    scheme: Scheme,
    mean_abs: Tensor,
    hessian: Tensor,
    options: AwqOptions = AwqOptions(),
    *,
    tie: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Scales s [K] for the columns of matrices [N_i, K] that share an input.

    W·diag(s) is what is rounded, x / s what it is multiplied with. Tried: a^r and a^r / w^(1 − r)
    for r in 0, 1/grid … 1, a the mean |x| and w the mean |W| / max of its group of each column,
    centred so that s ranges about 1; the one of least ‖X·(W − Ŵ)ᵀ‖² is taken. s = 1 where none is
    better. hessian [K, K] = XᵀX / T. tie: makes scales that several columns must share equal.
    Cost: 2·grid·rows·K² operations.
    """
    sample = torch.cat([_rows(weight, options.rows) for weight in weights]).float()
    size = mean_abs.clamp(min=1e-8)
    norm = _relative_size(sample, scheme.group or sample.shape[1]).clamp(min=1e-4)
    best_scales = torch.ones_like(size)
    best = _loss(sample, best_scales, scheme, hessian)
    dead = mean_abs <= 0
    for i in range(options.grid + 1):
        ratio = i / options.grid
        for raw in (size**ratio, size**ratio / norm ** (1 - ratio)):
            scales = centred(raw if tie is None else tie(raw), dead)
            loss = _loss(sample, scales, scheme, hessian)
            if loss < best:
                best, best_scales = loss, scales
    return best_scales


def centred(raw: Tensor, dead: Tensor) -> Tensor:
    """`raw` [K] over the geometric middle of its ends; 1 for `dead` columns, which had no input."""
    alive = raw[~dead]
    if alive.numel() == 0:
        return torch.ones_like(raw)
    scales = raw / (alive.max() * alive.min()).sqrt()
    return scales.clamp(1e-4, 1e4).masked_fill(dead, 1.0)


def _rows(weight: Tensor, count: int) -> Tensor:
    return weight[:: max(1, weight.shape[0] // count)]


def _relative_size(weight: Tensor, group: int) -> Tensor:
    """[K]: the mean over rows of |w| over the largest of its group."""
    size = torch.nn.functional.pad(weight.abs(), (0, -weight.shape[1] % group))
    parts = size.unflatten(1, (-1, group))
    relative: Tensor = parts / parts.amax(-1, keepdim=True).clamp(min=1e-12)
    return relative.flatten(1).mean(0)[: weight.shape[1]]


def _loss(weight: Tensor, scales: Tensor, scheme: Scheme, hessian: Tensor) -> float:
    static = 1.0 if scheme.static else None
    rounded = rtn.quantize(weight * scales, scheme, static).dequantize() / scales
    return output_error(weight - rounded, hessian)

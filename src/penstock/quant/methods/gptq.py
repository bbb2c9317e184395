"""GPTQ: what rounding a column loses is taken back by the columns that are still to be rounded.

Source: Frantar et al. 2022, arXiv:2210.17323 (algorithm 1; blocks and Cholesky: sections 3.2, 3.3).
Order by activations with scales chosen beforehand: the authors' code, `--act-order
--static-groups`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.errors import ConfigError, WeightsError
from penstock.ops.panels import round_up
from penstock.quant.codes import Codes
from penstock.quant.methods import rtn
from penstock.quant.methods.clip import clipped_scale
from penstock.quant.scheme import Scheme

logger = logging.getLogger("penstock")

_MOST_DAMPING = 10.0


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """How GPTQ rounds."""

    damping: float = 0.01  # of the mean of H's diagonal, added to all of it
    act_order: bool = True  # columns of the largest inputs first; scales are chosen before
    block: int = 128  # columns that are finished before the rest is updated
    clip: bool = False  # scales of the least error under H's blocks, instead of round-to-nearest's

    def __post_init__(self) -> None:
        if not 0 < self.damping <= 1 or self.block < 1:
            raise ConfigError(
                f"GPTQ with damping={self.damping}, block={self.block}: damping lies above 0 and "
                "not beyond 1, a block has a column at least."
            )


@dataclass(frozen=True, slots=True)
class Inverse:
    """What GPTQ needs of a Hessian; the matrices that share an input share it."""

    upper: Tensor  # [K, K] float32, upper triangular: H⁻¹ = upperᵀ · upper, columns in `order`
    order: Tensor  # [K] int64: which column comes when
    damping: float  # that it took
    dead: int  # columns whose inputs were always zero


def invert(hessian: Tensor, options: GptqOptions, name: str = "a matrix") -> Inverse:
    """Factor the inverse of `hessian` [K, K] = XᵀX / T.

    A column that never had an input is rounded to nearest and takes no part. Where Cholesky fails,
    damping grows tenfold until it doesn't, and a warning says so.
    Raises WeightsError where H isn't finite, or no damping helps.
    """
    if not bool(hessian.isfinite().all()):
        raise WeightsError(f"{name}: the Hessian of its inputs has NaN or infinite values.")
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    mean = float(diagonal[~dead].mean()) if not bool(dead.all()) else 1.0
    count = hessian.shape[0]
    order = torch.arange(count)
    if options.act_order:
        order = diagonal.argsort(descending=True, stable=True)
    h = hessian[order][:, order].clone()
    h.diagonal()[dead[order]] = mean
    damping = options.damping
    while True:
        damped = h.clone()
        damped.diagonal().add_(damping * mean)
        upper = _upper_of_inverse(damped)
        if upper is not None:
            break
        if damping * 10 > _MOST_DAMPING:
            raise WeightsError(
                f"{name}: the Hessian of its inputs [{count}, {count}] can't be inverted, even "
                f"with {damping:g} of its mean added. Take more calibration text."
            )
        logger.warning(
            "%s: the Hessian can't be inverted with damping %g; trying %g.",
            name, damping, damping * 10,
        )  # fmt: skip
        damping *= 10
    return Inverse(upper, order, damping, int(dead.sum()))


def _upper_of_inverse(h: Tensor) -> Tensor | None:
    lower, failed = torch.linalg.cholesky_ex(h)
    if int(failed):
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed) or not bool(upper.isfinite().all()):
        return None
    found: Tensor = upper
    return found


def quantize(
    weight: Tensor,
    scheme: Scheme,
    hessian: Tensor,
    options: GptqOptions = GptqOptions(),
    *,
    inverse: Inverse | None = None,
    input_scale: float | None = None,
    name: str = "a matrix",
) -> Codes:
    """weight [N, K] → codes of the least ‖X·(W − Ŵ)ᵀ‖², column by column; hessian = XᵀX / T.

    Scales come from the matrix as it is, so the order of columns leaves no trace in the codes.
    Without act_order, a group's come from its columns as they stand when their turn comes.
    inverse: of the same Hessian, where it is known already.
    Cost: N·K² operations and K³ for the inverse.
    """
    if hessian.shape != (weight.shape[1], weight.shape[1]):
        raise WeightsError(
            f"{name} is {list(weight.shape)}, but the Hessian of its inputs is "
            f"{list(hessian.shape)}."
        )
    inverse = inverse or invert(hessian, options, name)
    found = clipped_scale(weight, hessian, scheme) if options.clip else None
    scale, zero, outer = found or rtn.choose_scale(weight.float(), scheme)
    grid = _Grid(_column(scheme), scale.clone(), None if zero is None else zero.clone(), outer)
    late = scheme.group if scheme.is_integer and not options.act_order else 0
    w = weight.float().t()[inverse.order].contiguous()  # [K, N]: a column of W lies together
    codes: list[Tensor] = []
    block = round_up(options.block, late or 1)
    for start in range(0, w.shape[0], block):
        part, upper = w[start : start + block], inverse.upper[start : start + block]
        errors = torch.zeros_like(part)
        for i in range(part.shape[0]):
            if late and i % late == 0:
                at = slice(start + i, start + i + late)
                grid.choose(part[i : i + late].t(), hessian[at, at], scheme, options.clip, at.start)
            group = int(inverse.order[start + i]) // scheme.group if scheme.group else 0
            code, value = grid.round(part[i, :, None], group)
            codes.append(code)
            row = upper[i, start : start + part.shape[0]]
            errors[i] = (part[i] - value[:, 0]) / row[i]
            part[i + 1 :].addr_(row[i + 1 :], errors[i], alpha=-1)
        w[start + block :].addmm_(upper[:, start + block :].t(), errors, alpha=-1)
    values = torch.empty(tuple(weight.shape), dtype=codes[0].dtype)
    bytes_of(values)[:, inverse.order] = bytes_of(torch.cat(codes, 1))
    return Codes(scheme, values, grid.scale, grid.zero, outer, input_scale)


def bytes_of(values: Tensor) -> Tensor:
    """Codes as bytes: torch can't index float8."""
    return values.view(torch.uint8)


def _column(scheme: Scheme) -> Scheme:
    """`scheme` for a single column, which is a group."""
    if scheme.kind in ("mxfp4", "nvfp4"):
        return scheme
    return replace(scheme, group=0, rows=1, activations="float")


class _Grid:
    """The scales of a matrix, which may change group by group, and rounding under them."""

    def __init__(
        self, column: Scheme, scale: Tensor, zero: Tensor | None, outer: Tensor | None
    ) -> None:
        self.column, self.scale, self.zero, self.outer = column, scale, zero, outer

    def choose(self, part: Tensor, hessian: Tensor, scheme: Scheme, clip: bool, first: int) -> None:
        """Take the scales of the group that starts at column `first` from `part` [N, group]."""
        found = clipped_scale(part, hessian, scheme) if clip else None
        scale, zero, _ = found or rtn.choose_scale(part, scheme)
        self.scale[:, first // scheme.group] = scale[:, 0]
        if self.zero is not None and zero is not None:
            self.zero[:, first // scheme.group] = zero[:, 0]

    def round(self, column: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Codes and values [N, 1] of a column [N, 1]."""
        scale = self.scale[:, group : group + 1]
        zero = None if self.zero is None else self.zero[:, group : group + 1]
        codes = rtn.encode(column, self.column, scale, zero, self.outer)
        return codes, Codes(self.column, codes, scale, zero, self.outer).dequantize()

"""Round to nearest: each value by itself, the scale from those that share it alone.

`quantize` is every scheme in plain torch. `round_int8` and `round_int4` are the operators
(`ops.quantize`) that give the same codes, packed, for the commonest schemes.
Source: Jacob et al. 2017, arXiv:1712.05877; Dettmers & Zettlemoyer 2022, arXiv:2212.09720; FP8:
Micikevicius et al. 2022, arXiv:2209.05433; NF4: Dettmers et al. 2023, arXiv:2305.14314; MXFP4: OCP
Microscaling Formats 1.0, 6.3; NVFP4: NVIDIA 2025, arXiv:2509.25149.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock import ops
from penstock.errors import ConfigError, WeightsError
from penstock.ops.panels import COLUMNS
from penstock.ops.quantize import INT4_PARTS, LEAST_HALF, LEAST_ROW, sum_squares
from penstock.quant.codes import Codes
from penstock.quant.format import Packed
from penstock.quant.levels import levels
from penstock.quant.scheme import BLOCK, Scheme

Scales = tuple[Tensor, Tensor | None, Tensor | None]
"""scale [N, G] float32; zero [N, G] int8 or uint8, or None; outer [N] float32, or None."""

FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""What codes of eight bits of floating point are stored in."""

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_ROWS_AT_ONCE = 1 << 22
"""Values that are rounded together: temporaries stay small beside the matrix."""


def quantize(weight: Tensor, scheme: Scheme, input_scale: float | None = None) -> Codes:
    """The codes of `weight` [N, K] (any float dtype) in `scheme`, rounded to nearest.

    input_scale: of static activations, and only of them. The last group of a row may be shorter.
    Raises WeightsError for a value that is NaN or infinite and for one beyond what a scale holds.
    """
    if (input_scale is not None) != scheme.static:
        if input_scale is not None:
            raise ConfigError(f"{scheme.name} has no scale of activations that could be given.")
        raise ConfigError(
            f"{scheme.name} needs a scale of its activations, which calibration finds: "
            f"penstock export MODEL --quant {scheme.name} --calib TEXT."
        )
    if weight.dim() != 2 or weight.numel() == 0:
        raise WeightsError(f"Only a matrix [N, K] can be quantized, not {list(weight.shape)}.")
    scales = None if scheme.rows_apart else choose_scale(weight, scheme)
    rows = max(_ROWS_AT_ONCE // weight.shape[1], 1)
    parts = []
    for first in range(0, weight.shape[0], rows):
        part = slice(first, first + rows)
        found = choose_scale(weight[part], scheme) if scales is None else _rows_of(scales, part)
        values = encode(weight[part], scheme, *found)
        parts.append(Codes(scheme, values, *found, input_scale))
    return parts[0] if len(parts) == 1 else Codes.stack(parts)


def _rows_of(scales: Scales, part: slice) -> Scales:
    scale, zero, outer = scales
    return (
        scale[part],
        None if zero is None else zero[part],
        None if outer is None else outer[part],
    )


def choose_scale(weight: Tensor, scheme: Scheme) -> Scales:
    """Scales of `weight` [N, K] in `scheme`, spread over the rows that share them.

    low ≤ 0 ≤ high are the ends of the values that share a scale, top the larger magnitude.
    int8: top / 127; not symmetric (high − low) / 255, with the code of low at −128. In groups,
    the scale is rounded to float16. int4: as `ops.quantize_int4` says, for groups of any length.
    fp8: top / 448, of E5M2 top / 57,344. nf4: top, in float16. mxfp4: 2^(⌊log2 top⌋ − 2). nvfp4:
    outer = 1 / (448 · 6 / the whole matrix's top), and top / 6 / outer in E4M3.
    """
    grouped = _grouped(weight, scheme)
    low, high = _ends(grouped, scheme)
    top = torch.maximum(high, -low)
    if scheme.kind == "int8":
        scale, zero = _int8_scale(low, high, scheme)
    elif scheme.kind == "int4":
        scale, zero = _int4_scale(grouped, low, high, scheme)
    else:
        scale, zero = _float_scale(top, scheme), None
    outer = None
    if scheme.kind == "nvfp4":
        whole = top.amax()
        inverse = _E4M3_MAX * _E2M1_MAX / whole  # what files hold
        outer = torch.where(whole < LEAST_ROW, 1.0, torch.ones_like(whole) / inverse)
        scale = (top / _E2M1_MAX / outer).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn).float()
        outer = outer.expand(weight.shape[0]).contiguous()
    _check(weight, torch.where(top.isfinite(), scale, torch.nan))
    return scale.contiguous(), zero, outer


def encode(
    weight: Tensor, scheme: Scheme, scale: Tensor, zero: Tensor | None, outer: Tensor | None
) -> Tensor:
    """The codes [N, K] nearest to `weight` under given scales.

    Halves go to the even code, of NF4 to the lower level. What lies beyond the largest takes it.
    """
    w = weight.float()

    def spread(each: Tensor) -> Tensor:
        if not scheme.group:
            return each
        return each.repeat_interleave(scheme.group, 1)[:, : w.shape[1]]

    if scheme.is_integer:
        q = w * spread(torch.ones_like(scale) / scale)
        if zero is not None:
            low, high = (-128, 127) if scheme.kind == "int8" else (0, 15)
            q = torch.round(q).add_(spread(zero.float())).clamp_(low, high)
        elif scheme.kind == "int8":
            q = torch.round(q).clamp_(-127, 127)
        else:
            q = torch.round(q.clamp_(-8, 7)).add_(8)
        return q.to(torch.int8 if scheme.kind == "int8" else torch.uint8)
    if scheme.kind in FLOAT8:
        stored = FLOAT8[scheme.kind]
        end = torch.finfo(stored).max
        return (w / spread(scale)).clamp_(-end, end).to(stored)
    step = spread(scale if outer is None else scale * outer[:, None])
    u = torch.where(step > 0, w / step, 0.0)
    return _nearest_nf4(u) if scheme.kind == "nf4" else nearest_e2m1(u)


def nearest_e2m1(u: Tensor) -> Tensor:
    """The code 0 … 15 of E2M1 that is nearest to each value; beyond ±6 that of 6."""
    # a value on the border goes up where that code is even
    down = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    down[1::2] = torch.nextafter(down[1::2], torch.zeros(3))
    return (torch.bucketize(u.abs(), down.to(u.device)) + 8 * torch.signbit(u)).to(torch.uint8)


def _nearest_nf4(u: Tensor) -> Tensor:
    level = levels("nf4").double()
    return torch.bucketize(u.double(), ((level[1:] + level[:-1]) / 2).to(u.device)).to(torch.uint8)


def _grouped(weight: Tensor, scheme: Scheme) -> Tensor:
    """[N, K] as float32 [N, G, group], with zeros at the end."""
    k = weight.shape[1]
    group = scheme.group or k + -k % COLUMNS
    grouped: Tensor = functional.pad(weight.float(), (0, -k % group)).unflatten(1, (-1, group))
    return grouped


def _ends(grouped: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The least and the largest value [N, G] of those that share a scale, 0 between them."""
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    return -_shared(-low, scheme), _shared(high, scheme)


def _shared(top: Tensor, scheme: Scheme) -> Tensor:
    """The maxima [N, G] of the rows that share a scale, in each of them."""
    if scheme.rows == 1:
        return top
    n = top.shape[0]
    if scheme.rows == 0:
        return top.amax().expand(n, top.shape[1])
    blocks: Tensor = functional.pad(top, (0, 0, 0, -n % BLOCK)).unflatten(0, (-1, BLOCK)).amax(1)
    return blocks.repeat_interleave(BLOCK, 0)[:n]


def _half(scale: Tensor) -> Tensor:
    """Scales that are stored in float16."""
    return scale.clamp(min=LEAST_HALF).to(torch.float16).float()


def _int8_scale(low: Tensor, high: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    span, steps = (torch.maximum(high, -low), 127.0) if scheme.symmetric else (high - low, 255.0)
    scale = span / steps
    scale = _half(scale) if scheme.group else torch.where(span < LEAST_ROW, 1.0, scale)
    if scheme.symmetric:
        return scale, None
    zero = torch.round(-low * (torch.ones_like(scale) / scale)) - 128
    return scale, zero.nan_to_num().clamp_(-128, 127).to(torch.int8)


def _int4_scale(
    grouped: Tensor, low: Tensor, high: Tensor, scheme: Scheme
) -> tuple[Tensor, Tensor | None]:
    if not scheme.symmetric:
        scale = _half((high - low) / 15.0)
        zero = torch.round(-low * (torch.ones_like(scale) / scale)).clamp_(max=15)
        return scale, zero.nan_to_num().to(torch.uint8)
    top, sign = torch.maximum(high, -low), torch.where(high > -low, -1.0, 1.0)
    best, chosen = torch.full_like(top, torch.inf), torch.full_like(top, torch.nan)
    for part in INT4_PARTS:
        scale = sign * _half(top / part)
        u = grouped * (torch.ones_like(scale) / scale)[..., None]
        lost = sum_squares(u - torch.round(u.clamp(-8, 7)))[..., 0]
        if scheme.rows == 0:  # in float64, so that the order hardly matters
            lost = lost.double().sum().expand(lost.shape)
        error = lost * (scale * scale)
        less = error < best
        best, chosen = error.where(less, best), scale.where(less, chosen)
    return chosen, None


def _float_scale(top: Tensor, scheme: Scheme) -> Tensor:
    match scheme.kind:
        case "nf4":
            return _half(top)
        case "mxfp4":
            exponent = (torch.frexp(top)[1] - 3).clamp(-126, 127)  # top lies below 2^(⌊log2⌋ + 1)
            return torch.where(top > 0, torch.ldexp(torch.ones_like(top), exponent), 1.0)
        case "nvfp4":
            return top
    end = torch.full_like(top, torch.finfo(FLOAT8[scheme.kind]).max)
    return torch.where(top < LEAST_ROW, 1.0, top / end)


def round_int8(weight: Tensor, gated: bool = False) -> Packed:
    """[N, K] → int8 panels, one scale for a row."""
    panels, scale = ops.quantize_int8(weight, gated)
    _check(weight, scale)
    return {"weight": panels, "scale": scale}


def round_int4(weight: Tensor, group: int, symmetric: bool, gated: bool = False) -> Packed:
    """[N, K] → int4 panels with scales, and zero points where not symmetric, of groups of K."""
    panels, scale, zero = ops.quantize_int4(weight, group, symmetric, gated)
    _check(weight, scale)
    packed = {"weight": panels, "scale": scale}
    return packed if symmetric else {**packed, "zero": zero}


def _check(weight: Tensor, scale: Tensor) -> None:
    """What can't be rounded has a scale that isn't finite."""
    if bool(scale.isfinite().all()):
        return
    bad = ~weight.isfinite()
    if bool(bad.any()):
        raise WeightsError(
            f"{int(bad.sum())} of {weight.numel()} values of a weight {list(weight.shape)} are NaN "
            "or infinite and can't be quantized. The checkpoint is damaged."
        )
    raise WeightsError(
        f"A weight of {float(weight.abs().max()):.3g} needs a scale beyond float16's 65,504: these "
        "aren't weights of a trained model. Load them without quantization."
    )

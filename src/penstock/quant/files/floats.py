"""Codes that are small floats, as several layouts store them: 8 bits, and scales of 8 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.errors import WeightsError
from penstock.quant.codes import Codes
from penstock.quant.files.layout import Tensors, finite, number, scale_shape, spread
from penstock.quant.scheme import BLOCK, Activations, Kind, Scheme


def float8_scheme(
    dtype: torch.dtype, group: int, rows: int, activations: Activations
) -> Scheme | None:
    """The scheme of 8-bit floats whose scales `rows` rows and `group` columns share; None: none."""
    kind: Kind = "fp8_e4m3" if dtype is torch.float8_e4m3fn else "fp8_e5m2"
    if (group, rows) not in ((0, 0), (0, 1), (BLOCK, BLOCK)):
        return None
    return Scheme(kind, group, activations=activations, rows=rows)


def read_float8(
    tensors: Tensors,
    weight: str,
    scales: str,
    sharing: tuple[int, int],
    scheme: Scheme | None,
    input_scale: str,
) -> Tensor | Codes:
    """A matrix of 8-bit floats.

    sharing: the columns and rows that share a scale (0: all). input_scale: the tensor of static
    activations' scale, read where the scheme has one.
    """
    values, (group, rows) = tensors.raw(weight), sharing
    n, k = values.shape
    scale = finite(tensors, scales).reshape(scale_shape(n, k, group, rows))
    scale = spread(scale, n, rows)
    if scheme is None:
        return values.float() * scale.repeat_interleave(group or k, 1)[:, :k]
    static = number(tensors, input_scale) if scheme.static else None
    return Codes(scheme, values, scale, input_scale=static)


def read_exponents(tensors: Tensors, name: str, at: tuple[int | slice, ...] = ()) -> Tensor:
    """E8M0 scales, bytes e for 2^(e − 127), in float32; 255 stands for no number. at: which."""
    stored = tensors.raw(name)[at]
    if stored.dtype is torch.float8_e8m0fnu:
        stored = stored.view(torch.uint8)
    if stored.dtype is not torch.uint8:
        raise WeightsError(f"{name} holds scales in {stored.dtype}, not in bytes of exponents.")
    bad = int((stored == 255).sum())
    if bad:
        raise WeightsError(f"{bad} of the {stored.numel()} scales in {name} are NaN.")
    exponent = stored.int()  # as a float32's own; 2^-127 alone is below its normal numbers
    return torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)


def exponents(name: str, codes: Codes) -> Tensor:
    """Scales of mxfp4 as bytes; WeightsError where one isn't a power of two."""
    empty = (codes.values & 7 == 0).view(len(codes.scale), -1, codes.scheme.group).all(2)
    scale = torch.where((codes.scale == 0) & empty, 1.0, codes.scale)
    mantissa, exponent = torch.frexp(scale)
    wrong = (mantissa != 0.5) | (exponent < -126) | (exponent > 128)
    if wrong.any():
        raise WeightsError(
            f"{name}: {int(wrong.sum())} scales aren't powers of two from 2^-127 to 2^127, for "
            f"example {float(scale[wrong][0])}."
        )
    return (exponent + 126).to(torch.uint8)


def reciprocal(outer: Tensor) -> Tensor:
    """The float32 whose own reciprocal is `outer` [1], or the nearest where there is none."""
    near = outer.reciprocal()
    up, down = torch.tensor([float("inf")]), torch.tensor([0.0])
    for candidate in (near, torch.nextafter(near, up), torch.nextafter(near, down)):
        if torch.equal(candidate.reciprocal(), outer):
            return candidate
    return near

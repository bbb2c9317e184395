"""Normalisation of rows; `linear` can begin with one."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import define_op


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm`'s reference, for those that begin with it."""
    xf = x.float().unflatten(-1, (-1, weight.shape[0]))
    y: Tensor = xf * torch.rsqrt(xf.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    return y.view(x.shape).to(x.dtype)


@define_op("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", fake=_fake)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root-mean-square.

    x [T, D] any float, rows may be strided; weight [D] float32; returns [T, D] in x.dtype.
    y = x / sqrt(mean(x²) + eps) · weight, in float32, rounded once. Of contiguous rows [T, G · D]
    each of the G groups is a row of its own (on a CPU).
    Cost: 2·T·D·itemsize bytes moved (+ weight); memory-bound.
    Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    return rms(x, weight, eps)


def _fake_layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@define_op(
    "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor", fake=_fake_layer
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Centre each row and scale it to unit variance.

    x [T, D] any float, rows may be strided; weight, bias [D] float32; returns [T, D] in x.dtype.
    y = (x − mean) / sqrt(var + eps) · weight + bias, in float32; two passes, so that the variance
    doesn't cancel.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    xf = x.float()
    centred = xf - xf.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)

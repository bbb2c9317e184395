"""Matrix product with a packed weight, and what comes before and after it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.norm import rms
from penstock.ops.panels import unpack_int4, unpack_int8, unpack_panels
from penstock.ops.registry import define_op

Activation = Literal["none", "silu", "gelu", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = ("none", "silu", "gelu", "gelu_tanh")
"""What `activation` counts in."""


def _fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    int8_rows: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: int = 0,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features), dtype=out_dtype or x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of x [T, K] as int8 in ±127 and its scale [T, 1]: max|x| / 127."""
    xf = x.float()
    top = xf.abs().amax(-1, keepdim=True)
    largest = torch.full_like(top, 127.0)  # a tensor: torch divides a number by its reciprocal
    q = torch.round(xf * torch.where(top > 1e-30, largest / top, 0.0))
    return q.nan_to_num().to(torch.int8), top / 127.0


def activate(x: Tensor, activation: int) -> Tensor:
    """ACTIVATIONS[activation] of x."""
    match ACTIVATIONS[activation]:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
    return x


def _weight(weight: Tensor, scale: Tensor | None, zero: Tensor | None, n: int, k: int) -> Tensor:
    """The [N, K] float32 matrix that the panels stand for."""
    if weight.dim() == 2:
        return weight.float()
    if scale is None:
        return unpack_panels(weight, n, k).float()
    if weight.dtype is torch.int8:
        return unpack_int8(weight, scale, n, k)
    return unpack_int4(weight, scale, zero, n, k)


def _product(
    x: Tensor, weight: Tensor, scale: Tensor | None, zero: Tensor | None, n: int, int8_rows: bool
) -> Tensor:
    w = _weight(weight, scale, zero, n, x.shape[1])
    if not int8_rows:
        return x.float() @ w.t()
    q, row_scale = quantize_rows(x)
    return (q.float() @ w.t()) * row_scale


@define_op(
    "linear(Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, "
    "SymInt out_features, bool int8_rows=False, Tensor? norm=None, float eps=0.0, "
    "int activation=0, bool gated=False, ScalarType? out_dtype=None) -> Tensor",
    fake=_fake,
)
def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    int8_rows: bool = False,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: int = 0,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = act(norm(x) · Wᵀ + b).

    x [T, K] bfloat16 or float32, rows may be strided. weight, by its dtype (`ops.panels`):
        x.dtype     panels [N/16, K/v, 16, v] or, for the reference only, plain [N, K]
        int8        [N/16, K/4, 16, 4]; W = q · scale
        uint8       int4, [N/16, K/8, 16, 4]; W = (q − zero) · scale, zero 8 where it is None
    scale [N/16, G, 16] float16 or float32, zero [N/16, G, 16] uint8: of groups of K/G values.
    bias [N] float32. int8_rows: rows of x are rounded to int8, each with a scale of its own
    (max|x| / 127), and products are summed exactly in int32 within a group; else x is used as it
    is. norm [K] float32: `rms_norm` comes first. activation: an index into ACTIVATIONS.
    gated: the panels of gate and up alternate, bias holds [gate, up] and
    y = act(gate) · up with N = width of each. Returns [T, out_features] in `out_dtype` (x.dtype if
    None). Norm, gate and up are rounded to x.dtype, as if they were operators of their own.

    The native order of additions, the same on every ISA and for any T: per 32 values of K the
    even and the odd products are summed apart, each from zero, in order, by float32 FMA; then
    acc += even + odd (what AMX's TDPBF16PS does; products of two bfloat16 are exact in float32).
    float32 operands: one FMA per k, in order. Denormals are zero. Quantized: total = fma(sum of a
    group, its scale, total) in order of groups; then times the row's scale. Then the bias is added
    and the sum rounded once.
    Cost: 2·T·K·N operations; the weight's bytes, read once; memory-bound for small T.
    Source: Intel SDM vol. 2, TDPBF16PS, TDPBSSD; gated units: Shazeer 2020, arXiv:2002.05202;
    int8 rows: Dettmers et al. 2022, arXiv:2208.07339; groups: Frantar et al. 2022,
    arXiv:2210.17323.
    """
    out_dtype = out_dtype or x.dtype
    if norm is not None:
        x = rms(x, norm, eps)
    if not gated:
        y = _product(x, weight, scale, zero, out_features, int8_rows)
        if bias is not None:
            y = y + bias
        if activation:
            y = activate(y.to(x.dtype).float(), activation)
        return y.to(out_dtype)
    halves = []
    for i in range(2):
        half = [None if t is None else t[i::2] for t in (scale, zero)]
        y = _product(x, weight[i::2], half[0], half[1], out_features, int8_rows)
        if bias is not None:
            y = y + bias.view(2, -1)[i]
        halves.append(y.to(x.dtype).float())
    return (activate(halves[0], activation) * halves[1]).to(out_dtype)


def _fake_add(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    int8_rows: bool = False,
) -> None:
    return None


@define_op(
    "linear_add_(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? scale, Tensor? zero, "
    "Tensor? bias, bool int8_rows=False) -> ()",
    fake=_fake_add,
)
def linear_add_(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    int8_rows: bool = False,
) -> None:
    """residual += x · Wᵀ + b in place; the product is rounded to its dtype before it is added.

    residual [T, N], x [T, K] of one dtype; weights as in `linear`.
    Cost: that of `linear`, without writing and reading y.
    """
    y = _product(x, weight, scale, zero, residual.shape[1], int8_rows)
    if bias is not None:
        y = y + bias
    residual.add_(y.to(x.dtype))

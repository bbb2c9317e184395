"""Matrix product with a packed weight, and what comes before and after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.norm import rms
from penstock.ops.panels import unpack_panels, unpack_quantized
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
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features), dtype=out_dtype or x.dtype)


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each row of x [T, K] as int8 in ±127 and its scale [T, 1]: `scale` [1], or max|x| / 127."""
    xf = x.float()
    if scale is not None:
        q = torch.round(xf / scale).clamp_(-127, 127)
        return q.nan_to_num().to(torch.int8), scale + (xf * 0).sum(-1, keepdim=True)
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


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What of an operator's arguments is the weight, and how rows meet it."""

    weight: Tensor
    scale: Tensor | None
    zero: Tensor | None
    levels: int
    outer: Tensor | None
    int8_rows: bool
    input_scale: Tensor | None

    def values(self, n: int, k: int) -> Tensor:
        """The [N, K] float32 matrix that the panels stand for."""
        if self.weight.dim() == 2:
            return self.weight.float()
        if self.scale is None:
            return unpack_panels(self.weight, n, k).float()
        return unpack_quantized(self.weight, self.scale, self.zero, self.levels, self.outer, n, k)

    def product(self, x: Tensor, n: int) -> Tensor:
        """x · Wᵀ."""
        w = self.values(n, x.shape[1])
        if not self.int8_rows:
            return x.float() @ w.t()
        q, row_scale = quantize_rows(x, self.input_scale)
        return (q.float() @ w.t()) * row_scale

    def half(self, i: int) -> _Matrix:
        """Gate's panels (0) or up's (1)."""
        parts = (self.weight, self.scale, self.zero, self.outer)
        weight, scale, zero, outer = (None if t is None else t[i::2] for t in parts)
        assert weight is not None
        return replace(self, weight=weight, scale=scale, zero=zero, outer=outer)


@define_op(
    "linear(Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, "
    "SymInt out_features, bool int8_rows=False, Tensor? norm=None, float eps=0.0, "
    "int activation=0, bool gated=False, ScalarType? out_dtype=None, int levels=0, "
    "Tensor? outer=None, Tensor? input_scale=None) -> Tensor",
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
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """y = act(norm(x) · Wᵀ + b).

    x [T, K] bfloat16 or float32, rows may be strided. weight, by its dtype (`ops.panels`):
        x.dtype     panels [N/16, K/v, 16, v] or, for the reference only, plain [N, K]
        int8        [N/16, K/4, 16, 4]; W = q · scale
                    (q − zero) · scale where it has zero points
        float8_*    E4M3 or E5M2, the same shape; W = value · scale
        uint8       int4, [N/16, K/8, 16, 4]; W = (q − zero) · scale, zero 8 where it is None
                    with levels 1 (NF4) or 2 (E2M1): W = `ops.levels.table`[q] · scale
    scale [N/16, G, 16] float16, float32 or, of levels, uint8: the exponent of a power of two
    (OCP's E8M0; 0 is zero); zero [N/16, G, 16] uint8 of int4, int8 of int8: of groups of K/G
    values. outer [N/16, 1, 16] float32: W = table[q] · scale · outer, with scale [N/16, K/16, 16]
    in E4M3.
    bias [N] float32. int8_rows: rows of x are rounded to int8, each with a scale of its own
    (max|x| / 127) or all with input_scale [1], and products are summed exactly in int32 within a
    group; else x is used as it is. norm [K] float32: `rms_norm` comes first. activation: an index
    into ACTIVATIONS. gated: the panels of gate and up alternate, bias holds [gate, up] and
    y = act(gate) · up with N = width of each. Returns [T, out_features] in `out_dtype` (x.dtype if
    None). Norm, gate and up are rounded to x.dtype, as if they were operators of their own.

    The native order of additions, the same on every ISA and for any T: per 32 values of K the
    even and the odd products are summed apart, each from zero, in order, by float32 FMA; then
    acc += even + odd (what AMX's TDPBF16PS does; products of two bfloat16 are exact in float32).
    float32 operands: one FMA per k, in order. Denormals are zero. Quantized: total = fma(sum of a
    group, its scale, total) in order of groups; then times the row's scale. What q stands for, less
    its zero point or times the scale of its 16, is exact in bfloat16. Then the bias is added
    and the sum rounded once.
    Cost: 2·T·K·N operations; the weight's bytes, read once; memory-bound for small T.
    Source: Intel SDM vol. 2, TDPBF16PS, TDPBSSD; gated units: Shazeer 2020, arXiv:2002.05202;
    int8 rows: Dettmers et al. 2022, arXiv:2208.07339; groups: Frantar et al. 2022,
    arXiv:2210.17323; float8: arXiv:2209.05433; E2M1, E8M0: OCP Microscaling Formats 1.0.
    """
    out_dtype = out_dtype or x.dtype
    if norm is not None:
        x = rms(x, norm, eps)
    matrix = _Matrix(weight, scale, zero, levels, outer, int8_rows, input_scale)
    if not gated:
        y = matrix.product(x, out_features)
        if bias is not None:
            y = y + bias
        if activation:
            y = activate(y.to(x.dtype).float(), activation)
        return y.to(out_dtype)
    halves = []
    for i in range(2):
        y = matrix.half(i).product(x, out_features)
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
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> None:
    return None


@define_op(
    "linear_add_(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? scale, Tensor? zero, "
    "Tensor? bias, bool int8_rows=False, int levels=0, Tensor? outer=None, "
    "Tensor? input_scale=None) -> ()",
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
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> None:
    """residual += x · Wᵀ + b in place; the product is rounded to its dtype before it is added.

    residual [T, N], x [T, K] of one dtype; weights as in `linear`.
    Cost: that of `linear`, without writing and reading y.
    """
    matrix = _Matrix(weight, scale, zero, levels, outer, int8_rows, input_scale)
    y = matrix.product(x, residual.shape[1])
    if bias is not None:
        y = y + bias
    residual.add_(y.to(x.dtype))

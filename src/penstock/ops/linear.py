"""Matrix product with a packed weight, and what comes before and after it.

A weight W [N, K] by its dtype, in the shapes of panels (`ops.panels`; `ops.rows` has a GPU's):
    x.dtype     [N/16, K/v, 16, v]
    int8        [N/16, K/4, 16, 4]; W = q · scale
                (q − zero) · scale where it has zero points
    float8_*    E4M3 or E5M2, the same shape; W = value · scale
    uint8       int4, [N/16, K/8, 16, 4]; W = (q − zero) · scale, zero 8 where it is None
                with levels 1 (NF4) or 2 (E2M1): W = `ops.levels.table`[q] · scale
scale [N/16, G, 16] float16, float32 or, of levels, uint8: the exponent of a power of two (OCP's
E8M0; 0 is zero); zero [N/16, G, 16] uint8 of int4, int8 of int8: of groups of K/G values. outer
[N/16, 1, 16] float32: W = table[q] · scale · outer, with scale [N/16, K/16, 16] in E4M3.
K-quants, uint8 [N/16, K/256, lines, 64] (`ops.records`), have all of that in them.

row_codes, an index into ROW_CODES: what rows of x are rounded to before they are multiplied, each
with a scale of its own or all with input_scale [1]:
    int8        beside integers: round(x · 127 / max|x|), or round(x / input_scale) within ±127;
                the products of a group are summed exactly in int32
    int8_rotated  rows are rotated before that, as those of W were (`ops.rotate`): the product is
                that of what they were, but less of it is lost
    int8_blocks  each of the weight's groups of a row has a scale of its own, beside K-quants each
                256 values; without zero points
    e4m3        beside E4M3: x / scale to the nearest E4M3, ties to even, within ±448; the scale
                is max|x| / 448 of the values that share one of W's: the row, or a group of it
A row that holds a NaN or an infinity has the scale NaN.

The native order of additions, the same on every ISA and for any number of rows: per 32 values of
K the even and the odd products are summed apart, each from zero, in order, by float32 FMA; then
acc += even + odd (what AMX's TDPBF16PS does; products of two bfloat16 are exact in float32).
float32 operands: one FMA per k, in order. Denormals are zero. Quantized: total = fma(sum of a
group, its scale, total) in order of groups. The scale of an int8 row multiplies the total, those
of a row in E4M3 or in blocks each group's sum. What q stands for, less its zero point or times the
scale of its 16, is exact in bfloat16. K-quants beside floats are rounded to bfloat16 first and
multiplied as that is; beside int8_blocks, of each 256 values A = Σ factor · Σ (q − zero) · x and
M = Σ minimum · Σ x are exact in int32, total = fma(A, d · s, total), total = fma(M, −dmin · s,
total) with s the block's scale. Then the bias is added and the sum rounded once.

Source: Intel SDM vol. 2, TDPBF16PS, TDPBSSD; int8 rows: Dettmers et al. 2022, arXiv:2208.07339;
groups: Frantar et al. 2022, arXiv:2210.17323; float8: Micikevicius et al. 2022, arXiv:2209.05433;
rows of it in groups: DeepSeek-V3, arXiv:2412.19437; rotated ones: QuaRot, arXiv:2404.00456; E2M1,
E8M0: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.norm import rms
from penstock.ops.records import VALUES, has_records
from penstock.ops.registry import define_op
from penstock.ops.rotate import rotated
from penstock.ops.stored import dense, half, unpack_quantized, width

Activation = Literal["none", "silu", "gelu", "gelu_tanh", "swiglu_oai", "quick_gelu", "relu2"]
ACTIVATIONS: tuple[Activation, ...] = (
    "none",
    "silu",
    "gelu",
    "gelu_tanh",
    "swiglu_oai",
    "quick_gelu",
    "relu2",
)
"""What `activation` counts in. swiglu_oai comes with a gate: g · σ(1.702 · g) with
g = min(gate, 7), times up within ±7, plus 1 (openai/gpt-oss, arXiv:2508.10925); relu2 is
max(0, x)² (So et al. 2021, arXiv:2109.08668)."""

_LIMIT, _ALPHA = 7.0, 1.702
"""Of swiglu_oai."""

ROW_CODES = ("none", "int8", "e4m3", "int8_rotated", "int8_blocks")
"""What `row_codes` counts in."""


def _fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    row_codes: int = 0,
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


def quantize_blocks(x: Tensor, block: int) -> Tensor:
    """Rows of x [T, K] rounded to int8 in blocks, each by its own scale; float32."""
    blocks = functional.pad(x.float(), (0, -x.shape[1] % block)).unflatten(1, (-1, block))
    q, scale = quantize_rows(blocks.flatten(0, 1))
    return (q.float() * scale).view_as(blocks).flatten(1)[:, : x.shape[1]]


def quantize_rows_e4m3(
    x: Tensor, groups: int, padded: int, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of x [T, K] as values of E4M3, still float32, and their scales [T, groups].

    padded: K as the weight stores it, of which each group is an equal part.
    """
    k = x.shape[1]
    parts = functional.pad(x.float(), (0, padded - k)).unflatten(1, (groups, -1))
    if scale is None:
        top = parts.abs().amax(-1, keepdim=True)
        scale = torch.where(top > 1e-30, top / 448.0, 1.0)
    q = (parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    return q.flatten(1)[:, :k], (scale + (parts * 0).sum(-1, keepdim=True)).squeeze(-1)


def activate(x: Tensor, activation: int) -> Tensor:
    """ACTIVATIONS[activation] of x."""
    match ACTIVATIONS[activation]:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "swiglu_oai":
            clamped = x.clamp(max=_LIMIT)
            return clamped * (clamped * _ALPHA).sigmoid()
        case "quick_gelu":
            return x * (x * _ALPHA).sigmoid()
        case "relu2":
            return x.clamp(min=0.0).square()
    return x


def gated_by(gate: Tensor, up: Tensor, activation: int) -> Tensor:
    """ACTIVATIONS[activation] of gate, times up."""
    if ACTIVATIONS[activation] == "swiglu_oai":
        up = up.clamp(-_LIMIT, _LIMIT) + 1.0
    return activate(gate, activation) * up


@dataclass(frozen=True, slots=True)
class _Matrix:
    """What of an operator's arguments is the weight, and how rows meet it."""

    weight: Tensor
    scale: Tensor | None
    zero: Tensor | None
    levels: int
    outer: Tensor | None
    row_codes: int
    input_scale: Tensor | None

    def values(self, n: int, k: int) -> Tensor:
        """The [N, K] float32 matrix that the panels stand for."""
        if self.scale is None:
            return dense(self.weight, n, k).float()
        return unpack_quantized(self.weight, self.scale, self.zero, self.levels, self.outer, n, k)

    def product(self, x: Tensor, n: int) -> Tensor:
        """x · Wᵀ."""
        if ROW_CODES[self.row_codes] == "int8_rotated":
            q, row_scale = quantize_rows(rotated(x))
            return (q.float() @ self.values(n, q.shape[1]).t()) * row_scale
        w = self.values(n, x.shape[1])
        if has_records(self.weight) and not self.row_codes:
            w = w.bfloat16().float()
        match ROW_CODES[self.row_codes]:
            case "int8_blocks":
                block = VALUES
                if self.scale is not None:
                    block = width(self.weight) // self.scale.shape[1]
                return quantize_blocks(x, block) @ w.t()
            case "int8":
                q, row_scale = quantize_rows(x, self.input_scale)
                return (q.float() @ w.t()) * row_scale
            case "e4m3":
                assert self.scale is not None
                count, padded = self.scale.shape[1], width(self.weight)
                q, scales = quantize_rows_e4m3(x, count, padded, self.input_scale)
                of_each = scales.repeat_interleave(padded // count, 1)[:, : x.shape[1]]
                return (q * of_each) @ w.t()
        return x.float() @ w.t()

    def columns(self, x: Tensor, n: int, bias: Tensor | None) -> Tensor:
        """x · Wᵀ + b."""
        y = self.product(x, n)
        return y if bias is None else y + bias

    def half(self, i: int) -> _Matrix:
        """Gate's part (0) or up's (1)."""
        parts = (self.weight, self.scale, self.zero, self.outer)
        weight, scale, zero, outer = (None if t is None else half(t, i) for t in parts)
        assert weight is not None
        return replace(self, weight=weight, scale=scale, zero=zero, outer=outer)


@define_op(
    "linear(Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, "
    "SymInt out_features, int row_codes=0, Tensor? norm=None, float eps=0.0, "
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
    row_codes: int = 0,
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

    x [T, K] bfloat16 or float32, rows may be strided; weight, scale, zero, levels, outer and
    row_codes, input_scale as above; bias [N] float32. norm [K] float32: `rms_norm` comes first.
    activation: an index into ACTIVATIONS. gated: W is gate and up (panels of them alternate), bias
    [gate, up] and y = act(gate) · up with N = width of each. Returns [T, out_features] in
    `out_dtype` (x.dtype if None). Norm, gate and up are rounded to x.dtype, as if they were
    operators of their own.
    Cost: 2·T·K·N operations; the weight's bytes, read once; memory-bound for small T.
    Source: gated units: Shazeer 2020, arXiv:2002.05202; the rest: above.
    """
    return _ordered(
        x, weight, scale, zero, bias, out_features, row_codes, norm, eps, activation, gated,
        out_dtype, levels, outer, input_scale,
    )  # fmt: skip


def _ordered(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    row_codes: int,
    norm: Tensor | None,
    eps: float,
    activation: int,
    gated: bool,
    out_dtype: torch.dtype | None,
    levels: int,
    outer: Tensor | None,
    input_scale: Tensor | None,
) -> Tensor:
    """The reference of `linear`."""
    if norm is not None:
        x = rms(x, norm, eps)
    matrix = _Matrix(weight, scale, zero, levels, outer, row_codes, input_scale)
    if gated:
        biases = (None, None) if bias is None else bias.view(2, -1)
        gate, up = (
            matrix.half(i).columns(x, out_features, biases[i]).to(x.dtype).float() for i in (0, 1)
        )
        return gated_by(gate, up, activation).to(out_dtype or x.dtype)
    y = matrix.columns(x, out_features, bias)
    if activation:
        y = activate(y.to(x.dtype).float(), activation)
    return y.to(out_dtype or x.dtype)


def _fake_add(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    row_codes: int = 0,
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> None:
    return None


@define_op(
    "linear_add_(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? scale, Tensor? zero, "
    "Tensor? bias, int row_codes=0, int levels=0, Tensor? outer=None, "
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
    row_codes: int = 0,
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> None:
    """residual += x · Wᵀ + b in place; the product is rounded to its dtype before it is added.

    residual [T, N], x [T, K] of one dtype; weights as in `linear`.
    Cost: that of `linear`, without writing and reading y.
    """
    _ordered_add_(residual, x, weight, scale, zero, bias, row_codes, levels, outer, input_scale)


def _ordered_add_(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    row_codes: int,
    levels: int,
    outer: Tensor | None,
    input_scale: Tensor | None,
) -> None:
    """The reference of `linear_add_`."""
    matrix = _Matrix(weight, scale, zero, levels, outer, row_codes, input_scale)
    residual.add_(matrix.columns(x, residual.shape[1], bias).to(x.dtype))


@define_op(
    "linear_unordered(Tensor x, Tensor weight, Tensor? scale, Tensor? zero, Tensor? bias, "
    "SymInt out_features, int row_codes=0, Tensor? norm=None, float eps=0.0, "
    "int activation=0, bool gated=False, ScalarType? out_dtype=None, int levels=0, "
    "Tensor? outer=None, Tensor? input_scale=None) -> Tensor",
    fake=_fake,
)
def linear_unordered(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    row_codes: int = 0,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: int = 0,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> Tensor:
    """`linear` in whatever order of additions is fastest for that many rows.

    A row's bits may depend on the others; nothing else differs. For weights in rows.
    """
    return _ordered(
        x, weight, scale, zero, bias, out_features, row_codes, norm, eps, activation, gated,
        out_dtype, levels, outer, input_scale,
    )  # fmt: skip


@define_op(
    "linear_unordered_add_(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? scale, "
    "Tensor? zero, Tensor? bias, int row_codes=0, int levels=0, Tensor? outer=None, "
    "Tensor? input_scale=None) -> ()",
    fake=_fake_add,
)
def linear_unordered_add_(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    bias: Tensor | None,
    row_codes: int = 0,
    levels: int = 0,
    outer: Tensor | None = None,
    input_scale: Tensor | None = None,
) -> None:
    """`linear_add_` in whatever order of additions is fastest, as `linear_unordered`."""
    _ordered_add_(residual, x, weight, scale, zero, bias, row_codes, levels, outer, input_scale)

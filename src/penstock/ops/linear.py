"""Matrix product with a packed weight."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.panels import unpack_panels
from penstock.ops.registry import define_op


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features), dtype=out_dtype or x.dtype)


@define_op(
    "linear(Tensor x, Tensor weight, Tensor? bias, SymInt out_features, "
    "ScalarType? out_dtype=None) -> Tensor",
    fake=_fake,
)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = x · Wᵀ + b.

    x [T, K] rows may be strided; weight: panels [N/16, K/v, 16, v] (`ops.panels`) or, for the
    reference only, plain [N, K], in x.dtype; bias [N] float32; returns [T, N] in `out_dtype`
    (x.dtype if None).

    The native order of additions, the same on every ISA and for any T: per 32 values of K the
    even and the odd products are summed apart, each from zero, in order, by float32 FMA; then
    acc += even + odd (what AMX's TDPBF16PS does; products of two bfloat16 are exact in float32).
    float32 operands: one FMA per k, in order. Denormals are zero. Then the bias is added and the
    sum rounded once.
    Cost: 2·T·K·N FLOPs; K·N·itemsize bytes of weight, read once; memory-bound for small T.
    Source: Intel SDM vol. 2, TDPBF16PS.
    """
    k = x.shape[1]
    w = weight if weight.dim() == 2 else unpack_panels(weight, out_features, k)
    y = x.float() @ w.float().t()
    if bias is not None:
        y = y + bias
    return y.to(out_dtype or x.dtype)

"""`linear` and `linear_add_` by cuBLAS where that can multiply the matrix, else as they always are.

cuBLAS chooses its kernel, and with it the order of additions, by the number of rows: a row's bits
then depend on its company: these are the operators of those who ask for no exactness.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.triton.dequantize import BYTES, DENSE
from penstock.kernels.triton.launch import implement
from penstock.kernels.triton.linear import (
    DTYPES,
    Rows,
    Sums,
    ends_of,
    finish_sums,
    linear,
    linear_add_,
    rounded,
)
from penstock.kernels.triton.linear_forms import Form, Matrix
from penstock.kernels.triton.linear_sums import E4M3, INT8, Sizes

LEAST_ROWS = 64
"""Fewer are read with the matrix, whose bytes take longer than any product of theirs."""


def _suits(matrix: Matrix, form: Form, x: Tensor) -> bool:
    """Whether cuBLAS multiplies such a matrix with such rows."""
    if x.shape[0] < LEAST_ROWS:
        return False
    if form.codes == DENSE.value:
        return True
    whole = form.codes == BYTES.value and matrix.groups == 1 and matrix.zero is None
    sides = x.shape[1] == matrix.depth and not matrix.weight.shape[0] % 16
    if form.rows == E4M3.value:
        return whole and sides and x.dtype is torch.bfloat16
    return whole and sides and form.rows == INT8.value


def _product(rows: Rows, matrix: Matrix, form: Form) -> Tensor:
    """Rows times the whole matrix, [T, N] or [T, 2·N], before scales but in E4M3, where they're in.

    int32 of int8; else rounded to 16 bits, or in float32.
    """
    across = matrix.weight.t()
    if form.codes == DENSE.value:
        return torch.mm(rows.x, across)
    if form.rows == INT8.value:
        return torch._int_mm(rows.x, across)
    assert matrix.scale is not None and rows.scale is not None
    scale = matrix.scale.t()
    product: Tensor = torch._scaled_mm(
        rows.x, across, scale_a=rows.scale, scale_b=scale, out_dtype=torch.bfloat16
    )
    return product


def _multiply(
    x: Tensor,
    matrix: Matrix,
    form: Form,
    out: Tensor,
    norm: Tensor | None = None,
    eps: float = 0.0,
    activation: int = 0,
    residual: bool = False,
) -> None:
    """out = act(norm(x) · Wᵀ + b), or out += it: a product by cuBLAS, and one kernel after it."""
    rows, n = rounded(x, matrix, norm, eps), matrix.features
    product, ends = _product(rows, matrix, form), ends_of(rows, matrix, form, out)
    if form.rows == E4M3.value:
        ends = ends._replace(scale=None, row_scale=None)
    sums = Sums(product, n, product.stride(0))
    size = Sizes(n, x.shape[1], x.stride(0), matrix.weight.stride(0), matrix.groups)
    after = {
        "dtype": DTYPES[x.dtype],
        "ACTIVATION": activation,
        "GATED": matrix.gated,
        "RESIDUAL": residual,
    }
    finish_sums(sums, size, ends, x.shape[0], 1, after, {})


@implement("linear_unordered")
def fast_linear(
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
    """`ops.linear`, by cuBLAS for many rows of a matrix that it knows."""
    matrix = Matrix(weight, scale, zero, bias, row_codes, levels, outer, input_scale, gated)
    matrix.check(x, out_features)
    form = matrix.form(x)
    if not _suits(matrix, form, x):
        return linear(
            x, weight, scale, zero, bias, out_features, row_codes, norm, eps, activation, gated,
            out_dtype, levels, outer, input_scale,
        )  # fmt: skip
    if scale is None and bias is None and not activation and not gated and out_dtype is None:
        return torch.mm(rounded(x, matrix, norm, eps).x, weight.t())
    out = torch.empty((x.shape[0], out_features), dtype=out_dtype or x.dtype, device=x.device)
    _multiply(x, matrix, form, out, norm, eps, activation)
    return out


@implement("linear_unordered_add_")
def fast_linear_add_(
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
    """`ops.linear_add_`, by cuBLAS for many rows of a matrix that it knows."""
    matrix = Matrix(weight, scale, zero, bias, row_codes, levels, outer, input_scale)
    matrix.check(x, residual.shape[1])
    form = matrix.form(x)
    if _suits(matrix, form, x):
        _multiply(x, matrix, form, residual, residual=True)
    else:
        linear_add_(residual, x, weight, scale, zero, bias, row_codes, levels, outer, input_scale)

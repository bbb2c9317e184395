"""Rows that outlive a step, or come from beside it: copies of rows with other strides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.triton.launch import cdiv, implement

_BLOCK = 2048
"""Columns of a program."""


@triton.jit
def _copy(source, target, source_stride, target_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + row * source_stride + at, mask=at < columns)
    tl.store(target + row * target_stride + at, value, mask=at < columns)


def copy_rows(source: Tensor, target: Tensor) -> None:
    """target [T, D] = source [T, D], of one dtype; raises KernelError for other shapes."""
    rows, columns = source.shape
    if target.shape != source.shape:
        raise KernelError(
            f"Rows of shape {list(source.shape)} can't be copied to {list(target.shape)}: the "
            "store has room for the rows of the largest step that it was made for."
        )
    if source.numel():
        _copy[(rows, cdiv(columns, _BLOCK))](
            source, target, source.stride(0), target.stride(0), columns, BLOCK=_BLOCK
        )


@implement("keep_rows")
def keep_rows(x: Tensor, store: Tensor, column: int) -> None:
    """`ops.keep_rows`."""
    copy_rows(x, store[: x.shape[0], column : column + x.shape[1]])


@implement("kept_rows")
def kept_rows(tokens: Tensor, store: Tensor) -> Tensor:
    """`ops.kept_rows`."""
    y = torch.empty((tokens.shape[0], store.shape[1]), dtype=store.dtype, device=store.device)
    copy_rows(store[: tokens.shape[0]], y)
    return y


@triton.jit
def _place(store, x, wanted, store_stride, x_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < columns) & (tl.load(wanted + row) != 0)
    value = tl.load(store + row * store_stride + at, mask=inside)
    tl.store(x + row * x_stride + at, value, mask=inside)


@implement("place_rows_")
def place_rows_(x: Tensor, store: Tensor, wanted: Tensor) -> None:
    """`ops.place_rows_`."""
    rows, columns = x.shape
    if rows > store.shape[0] or columns != store.shape[1]:
        raise KernelError(f"Rows {list(x.shape)} can't come from a store {list(store.shape)}.")
    if x.numel():
        _place[(rows, cdiv(columns, _BLOCK))](
            store, x, wanted, store.stride(0), x.stride(0), columns, BLOCK=_BLOCK
        )

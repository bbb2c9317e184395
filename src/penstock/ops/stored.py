"""What stored weights stand for, in panels (`ops.panels`) or in rows (`ops.rows`)."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops import panels, records, rows
from penstock.ops.levels import table


def dense(weight: Tensor, n: int, k: int) -> Tensor:
    """The [N, K] matrix of a weight that comes without scales: as it is, or in records."""
    if records.has_records(weight):
        return records.unpack_records(weight, n, k)
    return weight if rows.is_rows(weight) else panels.unpack_panels(weight, n, k)


def width(weight: Tensor) -> int:
    """K as codes are stored, padding included."""
    if rows.is_rows(weight):
        return weight.shape[1] * (2 if weight.dtype is torch.uint8 else 1)
    return weight.shape[1] * (8 if weight.dtype is torch.uint8 else 4)


def half(each: Tensor, i: int) -> Tensor:
    """Gate's part (0) or up's (1) of a tensor of a gated matrix."""
    return each.chunk(2)[i] if each.dim() == 2 else each[i::2]


def unpack_quantized(
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    levels: int,
    outer: Tensor | None,
    n: int,
    k: int,
) -> Tensor:
    """The [N, K] float32 weight that codes stand for; arguments as in `ops.linear`."""
    codes = rows.unpack_codes(weight) if rows.is_rows(weight) else panels.unpack_codes(weight)
    values = table(levels).to(codes.device)[codes.long()] if levels else codes.float()
    if zero is not None:
        values = (_grouped(values, zero) - _of_groups(zero)).flatten(1)
    elif weight.dtype is torch.uint8 and not levels:
        values = values - 8
    for each in (powers(scale) if scale.dtype is torch.uint8 else scale, outer):
        if each is not None:
            values = (_grouped(values, each) * _of_groups(each)).flatten(1)
    return values[:n, :k]


def powers(exponents: Tensor) -> Tensor:
    """2^(e − 127) in float32 of uint8 exponents, 0 for e = 0: OCP's E8M0 without denormals."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def _grouped(values: Tensor, each: Tensor) -> Tensor:
    """[N, K] → [N, G, K/G], of the groups that `each` has."""
    grouped: Tensor = values.unflatten(1, (each.shape[1], -1))
    return grouped


def _of_groups(each: Tensor) -> Tensor:
    """Of each group, [N, G, 1] float32."""
    held = each if each.dim() == 2 else panels.unpack_groups(each)
    return held[..., None].float()

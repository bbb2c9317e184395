"""The panel layout that matrix operands share: weights, keys and values.

A panel holds 16 columns of a [K, N] operand. Within it, v = 4 / itemsize consecutive k of one
column lie together (VNNI order: 2 for bfloat16, 1 for float32), so that one 64-byte line carries
v k-steps of 16 columns and one broadcast 4-byte word of the other operand meets it:

    [N / 16, K / v, 16, v]

That is the tile that AMX multiplies, a cache line that AVX-512 loads, and two AVX2 vectors. K is
padded with zeros to a multiple of 32 and N to a multiple of 16; padding never changes a result,
since adding 0 · x to a sum leaves its bits as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS = 16
K_BLOCK = 32


def vnni_factor(dtype: torch.dtype) -> int:
    """v: how many consecutive k of one column share a 4-byte word."""
    return 4 // dtype.itemsize


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def panel_shape(n: int, k: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Shape of the panels of an [N, K] weight."""
    v = vnni_factor(dtype)
    return (round_up(n, COLUMNS) // COLUMNS, round_up(k, K_BLOCK) // v, COLUMNS, v)


def pack_panels(weight: Tensor) -> Tensor:
    """[N, K] → panels [⌈N/16⌉, ⌈K/32⌉·32/v, 16, v], zero-padded, contiguous."""
    n, k = weight.shape
    panels, rows, _, v = panel_shape(n, k, weight.dtype)
    out = torch.empty((panels, rows, COLUMNS, v), dtype=weight.dtype)
    grid = out.permute(0, 2, 1, 3)  # [N/16, 16, K/v, v]
    whole = n // COLUMNS
    source = weight
    if k != rows * v:
        source = torch.nn.functional.pad(weight, (0, rows * v - k))
    if whole:
        grid[:whole] = source[: whole * COLUMNS].reshape(whole, COLUMNS, rows, v)
    if n != whole * COLUMNS:
        rest = n - whole * COLUMNS
        grid[whole] = 0
        grid[whole, :rest] = source[whole * COLUMNS :].reshape(rest, rows, v)
    return out


def unpack_panels(panels: Tensor, n: int, k: int) -> Tensor:
    """The [N, K] weight that `pack_panels` was given."""
    count, rows, _, v = panels.shape
    return panels.permute(0, 2, 1, 3).reshape(count * COLUMNS, rows * v)[:n, :k]

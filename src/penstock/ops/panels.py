"""The panel layout that matrix operands share: weights, keys and values.

A panel holds 16 columns of a [K, N] operand. Within it, v = 4 / itemsize consecutive k of one
column lie together (VNNI order: 2 for bfloat16, 1 for float32), so that one 64-byte line carries
v k-steps of 16 columns and one broadcast 4-byte word of the other operand meets it:

    [N / 16, K / v, 16, v]

That is the tile that AMX multiplies, a cache line that AVX-512 loads, and two AVX2 vectors. K is
padded with zeros to a multiple of 32 and N to a multiple of 16; padding never changes a result,
since adding 0 · x to a sum leaves its bits as they are.

Quantized weights have panels of bytes, v = 4; K is padded to a multiple of 64, and of a group:

    int8  [N / 16, K / 4, 16, 4]    values in ±127
    int4  [N / 16, K / 8, 16, 4]    uint8: k = 8i + j in the low four bits, 8i + 4 + j in the high
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

COLUMNS = 16
K_BLOCK = 32
BYTE_BLOCK = 64
"""K of byte panels is a multiple."""


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
    """[N, K] → panels [⌈N/16⌉, ⌈K/32⌉·32/v, 16, v], zero-padded."""
    n, k = weight.shape
    panels, rows, _, v = panel_shape(n, k, weight.dtype)
    whole = functional.pad(weight, (0, rows * v - k, 0, -n % COLUMNS))
    return whole.view(panels, COLUMNS, rows, v).permute(0, 2, 1, 3).contiguous()


def unpack_panels(panels: Tensor, n: int, k: int) -> Tensor:
    """The [N, K] weight that `pack_panels` was given."""
    count, rows, _, v = panels.shape
    return panels.permute(0, 2, 1, 3).reshape(count * COLUMNS, rows * v)[:n, :k]


def pack_int8(q: Tensor, padded: int) -> Tensor:
    """[N, K] bytes → panels [⌈N/16⌉, padded/4, 16, 4]; padded: at least K, a multiple of 64."""
    grid = _whole(q, padded, 0).reshape(-1, COLUMNS, padded // 4, 4)
    return grid.permute(0, 2, 1, 3).contiguous()


def pack_int4(q: Tensor, padded: int, fill: int = 8) -> Tensor:
    """[N, K] uint8 below 16 → panels [⌈N/16⌉, padded/8, 16, 4]; padded as in `pack_int8`."""
    grid = _whole(q, padded, fill).reshape(-1, COLUMNS, padded // 8, 2, 4)
    pairs: Tensor = grid[..., 0, :] | grid[..., 1, :] << 4
    return pairs.permute(0, 2, 1, 3).contiguous()


def _whole(q: Tensor, padded: int, fill: int) -> Tensor:
    """q [N, K] with whole panels of rows and `padded` columns; itself where nothing is missing."""
    n, k = q.shape
    if n % COLUMNS == 0 and k == padded:
        return q  # functional.pad would copy it
    return functional.pad(q, (0, padded - k, 0, -n % COLUMNS), value=fill)


def unpack_codes(panels: Tensor) -> Tensor:
    """The [N, K] codes in panels of bytes, padding included: int8, or uint8 of four bits."""
    rows = panels.permute(0, 2, 1, 3)
    if panels.dtype is torch.uint8:
        rows = torch.stack((rows & 15, rows >> 4), dim=-2)
    return rows.reshape(panels.shape[0] * COLUMNS, -1)


def pack_groups(values: Tensor) -> Tensor:
    """Scales or zero points of groups, [N, G] → [⌈N/16⌉, G, 16]."""
    whole = functional.pad(values, (0, 0, 0, -values.shape[0] % COLUMNS))
    return whole.view(-1, COLUMNS, values.shape[1]).permute(0, 2, 1).contiguous()


def unpack_groups(values: Tensor) -> Tensor:
    """[N/16, G, 16] → [N, G], padding included."""
    return values.permute(0, 2, 1).reshape(-1, values.shape[1])


def alternate(gate: Tensor, up: Tensor) -> Tensor:
    """Panels of gate and up in turns."""
    return torch.stack((gate, up), dim=1).flatten(0, 1)

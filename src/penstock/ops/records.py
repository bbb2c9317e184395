"""K-quants: ggml's blocks of 256 values of a row, and panels of them with records of 16 rows.

A value is (d · factor) · (code − zero) − dmin · minimum, computed in float32; d and dmin are
float16 of a block, factor and minimum of a group of it:

    bits  ggml's  group  zero  factor  minimum  a block, in bytes
    4     Q4_K    32     0     6 bits  6 bits   d, dmin, 12 of factors and minima, 128 of codes
    5     Q5_K    32     0     6 bits  6 bits   d, dmin, those 12, 32 of fifth bits, 128 of codes
    6     Q6_K    16     32    int8    none     128 low bits, 64 of the others, 16 factors, d
    0     a mixture: any of these, padded to 210 bytes, and one more with its bits

A record holds the same of 16 rows, in lines of 64 bytes, so that a panel is one stream. Five lines:

    factors  [groups, 16]     then minima [4, 16, 2] of two groups each, where there are minima
    d        [16] float16     then dmin [16] float16, where there are minima

and for each 32 values of K

    low      [4, 16, 4]       k = 8i + j in the low four bits, 8i + 4 + j in the high (`ops.panels`)
    high     [1, 16, 4]       of 5 bits, fifth bits: bit t is of k = 4t + j
             [2, 16, 4]       of 6 bits: bits 2t, 2t + 1 are of k = 16i + 4t + j

The whole is uint8 [N/16, K/256, lines, 64]; a mixture's records have the lines of the longest and
one more, whose last byte says their bits, which are the same in all of a panel.

Source: `ggml-common.h` of github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.panels import COLUMNS, alternate, round_up
from penstock.ops.registry import define_op

VALUES = 256
"""Of a block."""
BLOCK_BYTES = {4: 144, 5: 176, 6: 210, 0: 211}
LINES = {4: 37, 5: 45, 6: 53, 0: 54}
"""By bits; 0: a mixture."""

_HEAD = 320
"""Bytes of a record before its codes."""

_AT_ONCE = 1 << 20
"""Values that are computed at once: what they need on the way stays small beside the matrix."""

_ZERO = 32
"""The code of 6 bits that stands for 0."""


def has_records(weight: Tensor) -> bool:
    """Whether a weight is stored in records."""
    return weight.dim() == 4 and weight.shape[3] == 64


@dataclass(frozen=True, slots=True)
class Blocks:
    """What blocks [N, S] of one number of bits are made of."""

    bits: int
    codes: Tensor  # [N, S, 256] uint8
    factor: Tensor  # [N, S, groups] int8
    d: Tensor  # [N, S] float16
    minimum: Tensor | None = None  # [N, S, groups] uint8
    least: Tensor | None = None  # [N, S] float16

    def values(self) -> Tensor:
        """[N, S · 256] float32."""
        n, s, groups = self.factor.shape
        codes = self.codes.view(n, s, groups, -1).float()
        step = self.d.float()[..., None] * self.factor
        if self.minimum is None or self.least is None:
            found = step[..., None] * (codes - _ZERO)
        else:
            found = (
                step[..., None] * codes - (self.least.float()[..., None] * self.minimum)[..., None]
            )
        return found.view(n, -1)


def _half(part: Tensor) -> Tensor:
    """[…, 2] bytes as float16 […]."""
    return part.contiguous().view(torch.float16).squeeze(-1)


def _fields(packed: Tensor, bits: int) -> Tensor:
    """[…, runs, bytes] → their lowest bits, the next, …: […, runs · 8 / bits · bytes]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    return ((packed[..., None, :] >> shifts) & ((1 << bits) - 1)).flatten(-3)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """12 bytes → 8 factors, 8 minima of 6 bits: four of each whole, the rest's top bits above."""
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    factor = torch.cat((first & 63, (rest & 15) | (first >> 6 << 4)), dim=-1)
    minimum = torch.cat((second & 63, (rest >> 4) | (second >> 6 << 4)), dim=-1)
    return factor.view(torch.int8), minimum


def read_blocks(blocks: Tensor, bits: int) -> Blocks:
    """[N, S · BLOCK_BYTES[bits]] uint8, of 4, 5 or 6 bits."""
    b = blocks.view(blocks.shape[0], -1, BLOCK_BYTES[bits])
    if bits == 6:
        low, high = b[..., :128].unflatten(-1, (2, 64)), b[..., 128:192].unflatten(-1, (2, 32))
        codes = _fields(low, 4) | _fields(high, 2) << 4
        return Blocks(
            6, codes, b[..., 192:208].contiguous().view(torch.int8), _half(b[..., 208:210])
        )
    factor, minimum = _six_bits(b[..., 4:16])
    low = b[..., 16:] if bits == 4 else b[..., 48:]
    codes = _fields(low.unflatten(-1, (4, 32)), 4)
    if bits == 5:
        codes = codes | _fields(b[..., None, 16:48], 1) << 4
    return Blocks(bits, codes, factor, _half(b[..., :2]), minimum, _half(b[..., 2:4]))


def _by_bits(blocks: Tensor, bits: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """(which rows, their blocks, of so many bits) for each number of bits that there is."""
    if bits:
        yield torch.ones(len(blocks), dtype=torch.bool), blocks, bits
        return
    own = blocks[:, BLOCK_BYTES[0] - 1]
    for one in own.unique().tolist():
        each = blocks[own == one].unflatten(1, (-1, BLOCK_BYTES[0]))[..., : BLOCK_BYTES[one]]
        yield own == one, each.flatten(1), one


def values_of(blocks: Tensor, bits: int) -> Tensor:
    """The [N, K] float32 that blocks stand for."""
    count = blocks.shape[1] // BLOCK_BYTES[bits] * VALUES
    found = torch.empty(len(blocks), count)
    step = max(_AT_ONCE // count, 1)
    for at in range(0, len(blocks), step):
        part = found[at : at + step]
        for rows, each, one in _by_bits(blocks[at : at + step], bits):
            part[rows] = read_blocks(each, one).values()
    return found


def count_strange(blocks: Tensor, bits: int) -> int:
    """How many of the blocks' d and dmin are NaN or infinite."""
    bad = 0
    for _, each, one in _by_bits(blocks, bits):
        b = each.unflatten(1, (-1, BLOCK_BYTES[one]))
        scales = (b[..., :2], b[..., 2:4]) if one != 6 else (b[..., 208:],)
        bad += sum(int((~_half(scale).isfinite()).sum()) for scale in scales)
    return bad


def mix(blocks: Tensor, bits: int) -> Tensor:
    """Blocks of one number of bits as those of a mixture."""
    if not bits:
        return blocks
    each = blocks.unflatten(1, (-1, BLOCK_BYTES[bits]))
    whole = functional.pad(each, (0, BLOCK_BYTES[0] - BLOCK_BYTES[bits]))
    whole[..., -1] = bits
    return whole.flatten(1)


def _records(found: Blocks, lines: int) -> Tensor:
    """[N/16, S, lines, 64]; N a multiple of 16."""

    def grid(each: Tensor) -> Tensor:  # [N, S, …] → [N/16, S, …, 16]
        apart: Tensor = each.unflatten(0, (-1, COLUMNS))
        return apart.movedim(1, -1)

    quads = grid(found.codes).unflatten(2, (-1, 4)).transpose(3, 4)  # [P, S, 64, 16, 4]
    pairs = quads.unflatten(2, (8, 4, 2))
    units = (pairs[:, :, :, :, 0] & 15) | pairs[:, :, :, :, 1] << 4  # [P, S, 8, 4, 16, 4]
    if found.bits > 4:
        width = found.bits - 4
        upper = (quads >> 4).unflatten(2, (8, width, 8 // width))
        shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1, 1)
        units = torch.cat((units, (upper << shifts).sum(4, dtype=torch.uint8)), dim=3)
    parts = [grid(found.factor).contiguous().view(torch.uint8)]
    halves = [grid(found.d)]
    if found.minimum is not None and found.least is not None:
        parts.append(grid(found.minimum).unflatten(2, (-1, 2)).transpose(3, 4))
        halves.append(grid(found.least))
    parts += [half.contiguous().view(torch.uint8) for half in halves]
    head = torch.cat([part.flatten(2) for part in parts], dim=2)
    whole = torch.cat((functional.pad(head, (0, _HEAD - head.shape[2])), units.flatten(2)), dim=2)
    padded = functional.pad(whole, (0, lines * 64 - whole.shape[2]))
    return padded.view(*padded.shape[:2], lines, 64)


def _read_records(weight: Tensor, bits: int) -> Blocks:
    """What `_records` was given; of a mixture's panels too."""
    flat, groups, at = weight.flatten(2), 16 if bits == 6 else 8, 0

    def take(count: int) -> Tensor:
        nonlocal at
        at += count
        return flat[..., at - count : at]

    def ungrid(each: Tensor) -> Tensor:  # [P, S, …, 16] → [N, S, …]
        return each.movedim(-1, 1).flatten(0, 1)

    units = flat[..., _HEAD : _HEAD + 512 * bits].unflatten(2, (8, bits, COLUMNS, 4))
    low = units[:, :, :, :4]
    quads = torch.stack((low & 15, low >> 4), dim=4).flatten(2, 4)
    if bits > 4:
        width = bits - 4
        upper = units[:, :, :, 4:].unsqueeze(4)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8).view(-1, 1, 1)
        quads = quads | ((upper >> shifts) & ((1 << width) - 1)).flatten(2, 4) << 4
    codes = ungrid(quads.transpose(3, 4).flatten(2, 3))
    factor = ungrid(
        take(groups * COLUMNS).contiguous().view(torch.int8).unflatten(2, (-1, COLUMNS))
    )
    minimum = None
    if bits != 6:
        pairs = take(groups * COLUMNS).unflatten(2, (-1, COLUMNS, 2)).transpose(3, 4)
        minimum = ungrid(pairs.flatten(2, 3))
    d = ungrid(take(2 * COLUMNS).contiguous().view(torch.float16))
    least = None if bits == 6 else ungrid(take(2 * COLUMNS).contiguous().view(torch.float16))
    return Blocks(bits, codes, factor, d, minimum, least)


def unpack_records(weight: Tensor, n: int, k: int) -> Tensor:
    """The [N, K] float32 that panels of records stand for."""
    panels, records, lines, _ = weight.shape
    bits = {count: bits for bits, count in LINES.items()}[lines]
    if bits:
        return _read_records(weight, bits).values()[:n, :k]
    found = torch.empty(panels, COLUMNS, records * VALUES)
    own = weight[:, 0, -1, -1]
    for one in own.unique().tolist():
        those = own == one
        found[those] = _read_records(weight[those], one).values().unflatten(0, (-1, COLUMNS))
    return found.flatten(0, 1)[:n, :k]


def _fake(blocks: Tensor, bits: int, gated: bool = False) -> Tensor:
    n, width = blocks.shape
    panels = round_up(n // 2 if gated else n, COLUMNS) // COLUMNS * (2 if gated else 1)
    return blocks.new_empty((panels, width // BLOCK_BYTES[bits], LINES[bits], 64))


@define_op("pack_records(Tensor blocks, int bits, bool gated=False) -> Tensor", fake=_fake)
def pack_records(blocks: Tensor, bits: int, gated: bool = False) -> Tensor:
    """Rows of blocks as panels of records, both as above.

    blocks [N, S · BLOCK_BYTES[bits]] uint8; gated: gate above up, [2·N, …], whose panels alternate.
    Of a mixture every 16 rows have blocks of one kind. Returns [N/16, S, LINES[bits], 64] uint8,
    twice as many panels when gated.
    Cost: the blocks' bytes read, about as many written.
    """
    if gated:
        return alternate(*(pack_records(part.contiguous(), bits) for part in blocks.chunk(2)))
    spare = -blocks.shape[0] % COLUMNS
    if bits:
        whole = functional.pad(blocks, (0, 0, 0, spare))
        return _records(read_blocks(whole, bits), LINES[bits])
    own = blocks[:, BLOCK_BYTES[0] - 1]
    own = torch.cat((own, own[-1:].expand(spare)))[::COLUMNS]
    whole = functional.pad(blocks, (0, 0, 0, spare)).unflatten(0, (-1, COLUMNS))
    made = blocks.new_empty((len(own), blocks.shape[1] // BLOCK_BYTES[0], LINES[0], 64))
    for one in own.unique().tolist():
        each = whole[own == one].flatten(0, 1).unflatten(1, (-1, BLOCK_BYTES[0]))
        found = read_blocks(each[..., : BLOCK_BYTES[one]].flatten(1), one)
        made[own == one] = _records(found, LINES[0])
        made[own == one, :, -1, -1] = one
    return made

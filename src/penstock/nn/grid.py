"""A tower for pictures of any size: patches turn by their rows and columns, most see a window; or
a table of positions is stretched over a picture.

Source: Wang et al. 2024, arXiv:2409.12191 (Qwen2-VL); Bai et al. 2025, arXiv:2502.13923; Tschannen
et al. 2025, arXiv:2502.14786 (SigLIP 2, of any shape); Agrawal et al. 2024, arXiv:2410.07073
(Pixtral).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock import ops
from penstock.nn.layer import DecoderLayer
from penstock.nn.linear import Embedding, Linear
from penstock.nn.norm import Norm
from penstock.nn.rope import RotaryTable
from penstock.nn.spec import GridSpec
from penstock.nn.vision import CHANNELS, MATRICES, Projector
from penstock.ops.rotary_cache import block_size
from penstock.quant import Dense, Storage
from penstock.step import LayerCache, Step

Ints = NDArray[np.int64]


class GridTower(nn.Module):
    """`forward(pixels, cache)` → rows for a decoder. No format rounds its matrices."""

    def __init__(self, spec: GridSpec, dtype: torch.dtype, storage: Storage) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        own = Dense(dtype, storage)
        values = CHANNELS * spec.frames * spec.patch**2
        self.patches = Linear(values, spec.hidden, spec.patch_bias, own)
        self.positions: Embedding | None = None
        if spec.table_side:
            self.positions = Embedding(spec.table_side**2, spec.hidden, dtype)
        self.table = PictureTable() if spec.theta else None
        formats = dict.fromkeys(MATRICES, own)
        self.layers = nn.ModuleList(
            DecoderLayer(spec.hidden, layer, spec.norm, formats, self.table, dtype)
            for layer in spec.layers
        )
        self.pre_norm = Norm(spec.hidden, spec.norm) if spec.pre_norm else None
        self.post_norm = Norm(spec.hidden, spec.last_norm or spec.norm)
        self.projector = Projector(spec.hidden, spec.projector, own)
        self.deep = nn.ModuleList(DeepProjector(spec, own) for _ in spec.deep)

    def windows(self, pixels: Tensor) -> list[Ints]:
        """The decoder's tokens of a picture [3, H, W] by windows, which are taken row by row."""
        high, wide = self.tokens(pixels)
        grid = np.arange(high * wide).reshape(high, wide)
        side = self.spec.window or max(high, wide)
        return [
            grid[y : y + side, x : x + side].ravel()
            for y in range(0, high, side)
            for x in range(0, wide, side)
        ]

    def tokens(self, pixels: Tensor) -> tuple[int, int]:
        """Rows and columns of a picture's tokens in the decoder."""
        unit = self.spec.patch * self.spec.projector.fold
        return pixels.shape[1] // unit, pixels.shape[2] // unit

    def blocks(self, pixels: Tensor, size: int) -> int:
        """Of `size` tokens, that `forward` needs of a cache."""
        each = self.spec.projector.fold**2
        return sum(-(-len(window) * each // size) for window in self.windows(pixels))

    def forward(self, pixels: Tensor, cache: LayerCache) -> Tensor:
        """pixels [3, H, W] of a picture → [tokens, decoder's D], and behind them as many columns
        for each of `spec.deep`.

        cache: of one layer, with `blocks` of it; what it held is overwritten.
        """
        spec, fold = self.spec, self.spec.projector.fold
        windows = self.windows(pixels)
        order = torch.from_numpy(np.concatenate(windows))
        x: Tensor = self.patches(self._cut(pixels)[order].flatten(0, 1))
        places = self._places(pixels, order)
        if self.positions is not None:
            stretched = self._scaled if spec.by_area else self._stretched
            ops.add_(x, stretched(self.positions.parameter("weight"), places, pixels))
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        if self.table is not None:
            self.table.turn(places, spec, pixels.device)
        lengths = [fold**2 * len(window) for window in windows]
        size, device = block_size(cache[0]), pixels.device
        parted = steps_of(lengths, size, device)
        together = steps_of([sum(lengths)], size, device)
        deep: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            layer(x, together if spec.sees_all(number) else parted, cache)
            if number in spec.deep:
                deep.append(self.deep[spec.deep.index(number)](x.view(len(order), -1)))
        rows = self.projector.of_folded(self.post_norm(x).view(len(order), -1))
        rows = torch.cat((rows, *deep), dim=1)
        found = torch.empty_like(rows)
        found[order] = rows
        return found

    def _cut(self, pixels: Tensor) -> Tensor:
        """[3, H, W] → [tokens, fold², 3 · frames · p²], as a convolution's weight has them."""
        (high, wide), patch, fold = self.tokens(pixels), self.spec.patch, self.spec.projector.fold
        cut = pixels.to(self.dtype).reshape(CHANNELS, high, fold, patch, wide, fold, patch)
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(5)
        cut = cut.expand(-1, -1, -1, -1, -1, self.spec.frames, -1, -1)
        return cut.reshape(high * wide, fold**2, -1)

    def _places(self, pixels: Tensor, order: Tensor) -> Ints:
        """[patches, 2]: row and column of each, in the order of tokens."""
        fold = self.spec.projector.fold
        y, x = np.divmod(order.numpy(), self.tokens(pixels)[1])
        within = np.indices((fold, fold)).reshape(2, -1).T
        return (np.stack((y, x), axis=1)[:, None] * fold + within).reshape(-1, 2)

    def _stretched(self, table: Tensor, places: Ints, pixels: Tensor) -> Tensor:
        """[patches, D]: the table of positions stretched over a picture, bilinearly from corner to
        corner, in float32 one tap after another.
        """
        side, patch = self.spec.table_side, self.spec.patch
        sizes = np.array([pixels.shape[1] // patch, pixels.shape[2] // patch], dtype=np.float32)
        at = places.astype(np.float32) * np.float32(side - 1) / np.maximum(sizes - 1, 1)
        low = np.floor(at)
        far, first = torch.from_numpy(at - low), torch.from_numpy(low.astype(np.int64))
        total: Tensor | None = None
        for down in (0, 1):
            for right in (0, 1):
                y, x = (first + torch.tensor((down, right))).clamp(max=side - 1).unbind(1)
                high, wide = (
                    (far[:, i] if step else 1 - far[:, i]) for i, step in ((0, down), (1, right))
                )
                rows = table[(y * side + x).to(table.device)].float()
                tap = rows * (high * wide)[:, None].to(table.device)
                total = tap if total is None else total + tap
        assert total is not None
        return total.to(table.dtype)

    def _scaled(self, table: Tensor, places: Ints, pixels: Tensor) -> Tensor:
        """[patches, D]: the table of positions scaled to a picture's shape, in float32 first along
        columns, then along rows, one tap after another.
        """
        side, patch = self.spec.table_side, self.spec.patch
        high, wide = pixels.shape[1] // patch, pixels.shape[2] // patch
        found = table.float().view(side, side, -1)
        found = _weighed(found, _area_taps(side, high))
        found = _weighed(found.transpose(0, 1), _area_taps(side, wide)).transpose(0, 1)
        y, x = torch.from_numpy(places).to(table.device).unbind(1)
        return found[y, x].to(table.dtype)


def _area_taps(side: int, size: int) -> Tensor:
    """[size, side] float32: of each place of `size` what it takes of a row's `side`, bilinearly
    between their middles, and over as many as fall on it where they are more.
    """
    scale = np.float32(side) / np.float32(size)
    middle = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    away = np.abs(np.arange(side, dtype=np.float32) - middle[:, None])
    taps = np.maximum(1 - away / np.maximum(scale, np.float32(1)), 0)
    return torch.from_numpy(taps / taps.sum(axis=1, keepdims=True))


def _weighed(rows: Tensor, taps: Tensor) -> Tensor:
    """rows [n, …], taps [m, n] → [m, …]."""
    total = rows.new_zeros(len(taps), *rows.shape[1:])
    for row, tap in zip(rows, taps.to(rows.device).unbind(1), strict=True):
        total += row * tap[:, None, None]
    return total


class DeepProjector(nn.Module):
    """Rows of a layer in the tower's middle → rows that a layer of the decoder gets as well."""

    def __init__(self, spec: GridSpec, own: Dense) -> None:
        super().__init__()
        self.norm = Norm(spec.hidden * spec.projector.fold**2, spec.norm)
        self.projector = Projector(spec.hidden, spec.projector, own)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, fold² · D] → [tokens, out]."""
        return self.projector.of_folded(self.norm(x))


class PictureTable(RotaryTable):
    """Of one picture's patches: half of the pairs turn by rows, half by columns."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.interleaved = False
        self.sections = ()
        self.cos_sin = torch.empty(0, 0)  # no buffer: nothing of it is kept with the model

    def turn(self, places: Ints, spec: GridSpec, device: torch.device) -> None:
        """From here on row t of the table is that of the patch at places[t]."""
        quarter = spec.layers[0].attention.head_dim // 4
        between = np.array([[0.0], [0.5 * spec.in_turns]])  # of columns, beside rows
        inverse = 1.0 / spec.theta ** ((np.arange(quarter) + between) / quarter)
        angles = places.astype(np.float32)[:, :, None] * inverse.astype(np.float32)
        angles = angles.reshape(len(places), -1).astype(np.float64)
        table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1).astype(np.float32)
        self.cos_sin = torch.from_numpy(table).to(device)


def steps_of(lengths: Sequence[int], size: int, device: torch.device) -> Step:
    """Sequences of so many tokens, each in blocks of its own: of `size`, one after another."""
    counts = np.array(lengths)
    blocks = -(-counts // size)
    firsts = np.cumsum(blocks) - blocks
    starts = np.concatenate(([0], np.cumsum(counts)))
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    slots = np.repeat(firsts * size, counts) + inside
    table = np.minimum(firsts[:, None] + np.arange(blocks.max()), blocks.sum() - 1)

    def ints(values: Ints) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(device)

    at = ints(np.arange(starts[-1]))
    return Step(at, at, ints(slots), ints(starts), ints(counts), ints(table), at[:0])

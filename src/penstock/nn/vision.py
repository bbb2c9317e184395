"""The vision tower: from a tile's pixels to rows that stand among a decoder's.

Its layers are the decoder's own, but that all patches see all: each tile is a sequence by itself,
and no layer has to remember the keys and values of another.
Source: Dosovitskiy et al. 2020, arXiv:2010.11929; folding: Shi et al. 2016, arXiv:1609.05158.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.nn.layer import DecoderLayer
from penstock.nn.linear import Embedding, Linear
from penstock.nn.norm import Norm
from penstock.nn.spec import ProjectorSpec, VisionSpec
from penstock.ops.rotary_cache import block_size
from penstock.quant import Dense, Storage, WeightFormat
from penstock.step import LayerCache, Step

CHANNELS = 3
"""Of a picture: red, green, blue."""
MATRICES = ("qkv", "out", "up", "down")
"""That a layer has."""


class VisionTower(nn.Module):
    """`forward(pixels, cache)` → rows for a decoder. No format rounds its matrices."""

    def __init__(self, spec: VisionSpec, dtype: torch.dtype, storage: Storage) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        own = Dense(dtype, storage)
        self.patches = Linear(CHANNELS * spec.patch**2, spec.hidden, spec.patch_bias, own)
        self.positions = Embedding(spec.rows, spec.hidden, dtype)
        self.first = Embedding(1, spec.hidden, dtype) if spec.class_token else None
        self.pre_norm = Norm(spec.hidden, spec.norm) if spec.pre_norm else None
        formats = dict.fromkeys(MATRICES, own)
        self.layers = nn.ModuleList(
            DecoderLayer(spec.hidden, layer, spec.norm, formats, None, dtype)
            for layer in spec.layers
        )
        self.post_norm = Norm(spec.hidden, spec.norm) if spec.post_norm else None
        self.projector = Projector(spec.hidden, spec.projector, own)
        self.line_end = Embedding(1, spec.projector.out, dtype) if spec.ends_lines else None

    def blocks(self, pixels: Tensor, size: int) -> int:
        """Of `size` tokens, that `forward` needs of a cache."""
        return -(-self.spec.rows // size)

    def forward(self, pixels: Tensor, cache: LayerCache) -> Tensor:
        """pixels [3, S, S] of a tile → [tokens, decoder's D].

        cache: of one layer, with blocks for `spec.rows` tokens; what it held is overwritten.
        """
        spec = self.spec
        x: Tensor = self.patches(self._cut(pixels))
        if self.first is not None:
            x = torch.cat((self.first.parameter("weight"), x))
        ops.add_(x, self.positions(self._places(x.device)))
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        step = self._step(x.device, block_size(cache[0]))
        for layer in self.layers:
            layer(x, step, cache)
        if self.post_norm is not None:
            x = self.post_norm(x)
        rows: Tensor = self.projector(x[spec.class_token - spec.keeps_class :], spec.side)
        return rows

    def _cut(self, pixels: Tensor) -> Tensor:
        """[3, S, S] → [patches, 3 · p²], a row's values in the order of a convolution's weight."""
        patch, side = self.spec.patch, self.spec.side
        cut = pixels[:, : side * patch, : side * patch].to(self.dtype)
        cut = cut.reshape(CHANNELS, side, patch, side, patch)
        return cut.permute(1, 3, 0, 2, 4).reshape(side**2, -1)

    def _places(self, device: torch.device) -> Tensor:
        """[rows] int32: which row of the table of positions each has."""
        if not self.spec.by_fractions:
            return torch.arange(self.spec.rows, dtype=torch.int32, device=device)
        along = _by_fractions(self.spec.side)
        return (along[:, None] * self.spec.side + along).flatten().int().to(device)

    def _step(self, device: torch.device, size: int) -> Step:
        """One sequence, whose blocks are the cache's first."""
        count = self.spec.rows
        at = torch.arange(count, dtype=torch.int32, device=device)
        length = torch.tensor([count], dtype=torch.int32, device=device)
        start = torch.tensor([0, count], dtype=torch.int32, device=device)
        return Step(at, at, at, start, length, at[None, : -(-count // size)], at[:0])


def _by_fractions(side: int) -> Tensor:
    """The place [side] of each patch of a side, found by its fraction in float32.

    That is its own number, but where a fraction is rounded over a bound: the towers that are known
    by it were trained so.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor([side]))
    return torch.bucketize(fractions.clamp(max=1 - 1e-6), bounds, right=True)


class Projector(nn.Module):
    """Rows of a tower → rows of a decoder."""

    def __init__(self, hidden: int, spec: ProjectorSpec, own: WeightFormat) -> None:
        super().__init__()
        self.spec = spec
        wide = spec.width(hidden)
        self.merge = Linear(hidden * spec.fold**2, hidden, False, own) if spec.merges else None
        self.norm = None if spec.norm is None else Norm(wide, spec.norm)
        inner, two = spec.inner or spec.out, spec.activation != "none"
        self.up = Linear(wide, inner, spec.bias, own, activation=spec.activation)
        self.down = Linear(inner, spec.out, spec.bias, own) if two else None

    def forward(self, x: Tensor, side: int) -> Tensor:
        """x [side², D], by rows of patches, → [(side / fold)², out]."""
        fold = self.spec.fold
        if fold > 1:
            few = side // fold
            x = x.view(few, fold, few, fold, -1).transpose(1, 2).reshape(few**2, fold**2, -1)
            x = _mean(x) if self.spec.pools else x.flatten(1)
        return self.of_folded(x)

    def of_folded(self, x: Tensor) -> Tensor:
        """x [tokens, fold² · D], or its mean, → [tokens, out]."""
        if self.merge is not None:
            x = self.merge(x)
        y: Tensor = self.up(x if self.norm is None else self.norm(x))
        return y if self.down is None else self.down(y)


def _mean(x: Tensor) -> Tensor:
    """x [n, k, D] → [n, D]: the mean of k, added in float32 one after another."""
    total, *others = x.float().unbind(1)
    for one in others:
        total = total + one
    return (total / x.shape[1]).to(x.dtype)

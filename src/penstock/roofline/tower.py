"""What a vision tower moves and computes for a tile of a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.nn.spec import GridSpec, LayerSpec, ProjectorSpec, VisionSpec
from penstock.nn.vision import CHANNELS
from penstock.quant import Dense


@dataclass(slots=True)
class TowerCost:
    """Of tiles that went through a tower."""

    weight_bytes: int = 0
    flops: int = 0  # products

    def add(self, other: TowerCost) -> None:
        """Count more."""
        self.weight_bytes += other.weight_bytes
        self.flops += other.flops


def tile_cost(spec: VisionSpec, dense: Dense) -> TowerCost:
    """Of one tile: each matrix once, and every patch with every other."""
    rows, patches = spec.rows, spec.side**2
    found = _product(dense, patches, spec.hidden, CHANNELS * spec.patch**2)
    for layer in spec.layers:
        found.add(_layer(dense, layer, spec.hidden, rows, [rows]))
    found.add(_projector(dense, spec.projector, spec.hidden, spec.tokens))
    return found


def grid_cost(spec: GridSpec, dense: Dense, windows: Sequence[int]) -> TowerCost:
    """Of one picture. windows: tokens of the decoder in each."""
    fold = spec.projector.fold**2
    rows = fold * sum(windows)
    values = CHANNELS * spec.frames * spec.patch**2
    found = _product(dense, rows, spec.hidden, values)
    for number, layer in enumerate(spec.layers):
        seen = [rows] if spec.sees_all(number) else [fold * count for count in windows]
        found.add(_layer(dense, layer, spec.hidden, rows, seen))
    for _ in range(1 + len(spec.deep)):
        found.add(_projector(dense, spec.projector, spec.hidden, sum(windows)))
    return found


def _product(dense: Dense, m: int, n: int, k: int) -> TowerCost:
    return TowerCost(dense.nbytes(n, k), 2 * m * n * k)


def _layer(
    dense: Dense, layer: LayerSpec, hidden: int, rows: int, sequences: Sequence[int]
) -> TowerCost:
    inner = layer.mlp.intermediate
    wide = layer.attention.num_heads * layer.attention.head_dim
    found = TowerCost(0, sum(4 * count**2 * wide for count in sequences))
    up = inner * (2 if layer.mlp.gated else 1)
    for n, k in ((3 * wide, hidden), (hidden, wide), (up, hidden), (hidden, inner)):
        found.add(_product(dense, rows, n, k))
    return found


def _projector(dense: Dense, spec: ProjectorSpec, hidden: int, tokens: int) -> TowerCost:
    inner = spec.inner or spec.out
    found = _product(dense, tokens, inner, spec.width(hidden))
    if spec.merges:
        found.add(_product(dense, tokens, hidden, hidden * spec.fold**2))
    if spec.activation != "none":
        found.add(_product(dense, tokens, spec.out, inner))
    return found

"""Rotary position embedding: the table of cosines and sines.

Angles are float32 products of position and inverse frequency, as `transformers` computes them;
their cosine and sine are taken in float64 and rounded, so that every machine has the same table.
Source: Su et al. 2021, arXiv:2104.09864.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.nn.spec import RopeSpec

Floats = NDArray[np.float64]


def inverse_frequencies(rope: RopeSpec, max_len: int) -> tuple[Floats, float]:
    """Inverse frequencies [R/2] (radians per position), and the factor on cos and sin.

    `max_len` selects between the short and the long factors of `longrope`: one choice for the
    whole engine, so that a sequence's keys never change while it grows.
    """
    half = np.arange(0, rope.rotary_dim, 2, dtype=np.float64)
    base = rope.theta ** (half / rope.rotary_dim)
    if rope.kind == "proportional":
        moves = half < rope.moving_dim
        return np.where(moves, 1.0 / (base * rope.factor), 0.0), 1.0
    if rope.kind == "linear":
        return 1.0 / (base * rope.factor), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / base), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, base)
    if rope.kind == "longrope":
        long = max_len > rope.original_max_position
        factors = np.asarray(rope.long_factors if long else rope.short_factors, dtype=np.float64)
        return 1.0 / (factors * base), _longrope_factor(rope)
    return 1.0 / base, 1.0


def _llama3(rope: RopeSpec, inv: Floats) -> Floats:
    """Slow angles are divided by `factor`, fast ones kept, those between interpolated.

    Source: Llama 3.1's reference code, `apply_scaling`.
    """
    wavelength = 2 * math.pi / inv
    turns = rope.original_max_position / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray((1 - smooth) * inv / rope.factor + smooth * inv)


def _yarn(rope: RopeSpec, base: Floats) -> tuple[Floats, float]:
    """Interpolate by how often a dimension turns within the original context.

    Source: Peng et al. 2023, arXiv:2309.00071.
    """

    def dimension(turns: float) -> float:
        scaled = rope.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(scaled) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (np.arange(rope.rotary_dim // 2) - low) / max(high - low, 0.001)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    inv = (1.0 / (rope.factor * base)) * (1 - keep) + (1.0 / base) * keep
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return np.asarray(inv), factor


def _longrope_factor(rope: RopeSpec) -> float:
    """Source: Ding et al. 2024, arXiv:2402.13753."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))


_ROWS = 1024
"""Positions at a time: what is computed between stays in a core's cache."""


def cos_sin_table(rope: RopeSpec, max_len: int, reach: int | None = None) -> Tensor:
    """[max_len, R] float32: R/2 cosines, then R/2 sines, for positions 0 … max_len − 1.

    reach: how far apart a query and a key can be at most; it chooses among longrope's factors. From
    there on angles are float64 products: a float32 one of position 1,000,000 is 0.03 rad off.
    """
    inv, factor = inverse_frequencies(rope, min(max_len, reach or max_len))
    half = len(inv)
    table = np.empty((max_len, 2 * half), dtype=np.float32)

    def fill(first: int) -> None:
        part = table[first : first + _ROWS]
        positions = np.arange(first, first + len(part), dtype=np.float32)
        angles = np.outer(positions, inv.astype(np.float32)).astype(np.float64)
        if reach is not None and first + len(part) > reach:
            late = np.arange(max(first, reach), first + len(part), dtype=np.float64)
            angles[len(part) - len(late) :] = np.outer(late, inv.astype(np.float32))
        part[:, :half] = np.cos(angles) * factor
        part[:, half:] = np.sin(angles) * factor

    if max_len <= _ROWS:
        fill(0)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(fill, range(0, max_len, _ROWS)))
    return torch.from_numpy(table)


class RotaryTable(nn.Module):
    """One table, shared by every layer with the same `RopeSpec`."""

    cos_sin: Tensor

    def __init__(self, rope: RopeSpec, max_len: int, reach: int | None = None) -> None:
        """reach: as `cos_sin_table` takes it."""
        super().__init__()
        self.interleaved = rope.interleaved
        self.register_buffer("cos_sin", cos_sin_table(rope, max_len, reach), persistent=False)
        self.sections, self.in_turns = rope.sections, rope.in_turns
        self.length = 0  # positions, where spare rows come behind them

    def make_room(self, rows: int) -> None:
        """Spare rows behind the last position, for tokens that turn by three numbers."""
        self.length = len(self.cos_sin)
        spare = self.cos_sin.new_zeros((rows, self.cos_sin.shape[1]))
        self.cos_sin = torch.cat((self.cos_sin, spare))

    def turn_apart(self, rows: Tensor, places: Tensor) -> None:
        """Spare rows [n] become those of places [n, 3] in time, rows and columns: of each pair of
        dimensions the one that its section says (M-RoPE).

        Source: Wang et al. 2024, arXiv:2409.12191.
        """
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(self.sections))
        if self.in_turns:
            axes = torch.zeros_like(axes)
            for axis in (1, 2):
                axes[axis : 3 * self.sections[axis] : 3] = axis
        columns = torch.cat((axes, axes)).to(places.device)
        found = self.cos_sin.gather(0, places[:, columns])
        self.cos_sin.index_copy_(0, rows + self.length, found)

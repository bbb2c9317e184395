"""States of sequences, for layers that have them in place of keys and values: numbered slots.

What one layer has of a slot lies in one piece (`ops.delta`): the state [slots, …] in float32 and
the inputs before it [slots, …] in the dtype of activations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.cache.pages import lazy_zeros
from penstock.step import KV

Shape = tuple[int, ...]


class StateCache(NamedTuple):
    """What one layer has of all slots; no part of any block."""

    state: Tensor
    inputs: Tensor


def holds_states(kv: KV) -> bool:
    """Whether any layer has states in place of a cache."""
    return any(isinstance(layer, StateCache) for layer in kv)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Slots of layers with states: of each layer the shapes of a slot's two parts, or None."""

    shapes: tuple[tuple[Shape, Shape] | None, ...]
    dtype: torch.dtype  # of inputs
    slots: int
    guesses: int = 0  # of them, for what guesses leave

    @property
    def sequences(self) -> int:
        """How many may run at once, with two slots each."""
        return (self.slots - self.guesses) // 2

    @property
    def bytes_per_slot(self) -> int:
        """Of all layers."""
        return sum(map(self.bytes_of, range(len(self.shapes))))

    def bytes_of(self, layer: int) -> int:
        """Of a slot in one layer, read or written."""
        shapes = self.shapes[layer]
        if shapes is None:
            return 0
        return 4 * math.prod(shapes[0]) + self.dtype.itemsize * math.prod(shapes[1])

    @property
    def nbytes(self) -> int:
        """Of all that `allocate` gives."""
        return self.slots * self.bytes_per_slot

    def allocate(self) -> list[StateCache | None]:
        """Zeros of each layer, committed as they are first used."""
        return [
            None
            if shapes is None
            else StateCache(
                lazy_zeros((self.slots, *shapes[0]), torch.float32),
                lazy_zeros((self.slots, *shapes[1]), self.dtype),
            )
            for shapes in self.shapes
        ]

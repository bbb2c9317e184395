"""Heads as native calls: states in, logits of all of them out."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.nn.medusa import MedusaHeads
from penstock.runtime.device import Device
from penstock.runtime.forwards import forward_beside
from penstock.step import KV, Step


class HeadsRunner:
    """Runs heads over some states; one thread's."""

    def __init__(self, heads: MedusaHeads, device: Device, eager: bool, width: int) -> None:
        """width: how many of a head's tokens are looked at."""
        self._heads = heads
        self._kv: KV = []
        rows = len(heads.features)
        most = rows * heads.spec.num_heads
        what = "A pass of the heads"
        self._forward = forward_beside(device, heads, self._kv, eager, what, (rows, width))
        self._shared = None
        if heads.shared is not None:
            what = "The projection of all of them"
            sizes = most, width
            self._shared = forward_beside(device, heads.shared, self._kv, eager, what, sizes)
        self._zeros = torch.zeros(most, dtype=torch.int32)
        self._count = torch.arange(most + 1, dtype=torch.int32)
        self._steps: dict[int, Step] = {}  # by the number of rows: nothing else is read of them

    def __call__(self, states: Tensor) -> Tensor:
        """Logits [R, K, V] float32 after states [R, D], good until the next call."""
        spec, most = self._heads.spec, len(self._heads.features)
        with torch.inference_mode():
            if len(states) <= most:
                logits = self._run(states)
            else:
                parts = [self._run(part).clone() for part in states.split(most)]
                logits = torch.cat(parts)
            return logits.view(len(states), spec.num_heads, spec.num_rows)

    def _run(self, states: Tensor) -> Tensor:
        count = len(states)
        self._heads.features[:count] = states
        self._forward(self._step(count), self._kv)
        if self._shared is None:
            return self._heads.logits[:count]
        return self._shared(self._step(count * self._heads.spec.num_heads), self._kv)

    def _step(self, rows: int) -> Step:
        found = self._steps.get(rows)
        if found is None:
            zeros, count = self._zeros[:rows], self._count
            found = Step(
                zeros, zeros, zeros, count[: rows + 1], count[1:2].expand(rows).contiguous(),
                zeros[:, None], count[:rows],
            )  # fmt: skip
            self._steps[rows] = found
        return found

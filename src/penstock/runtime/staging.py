"""A step's arrays on their way to a GPU: laid out side by side, sent by one copy.

A padded step has more tokens and sequences than are asked for. What is beyond the real ones
belongs to nobody: its tokens have no slot, its sequences no queries and no context.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from penstock.step import ForkedStep, Step

_ALIGNED = 32
"""Arrays begin at a multiple of so many int32: kernels are compiled for aligned pointers."""

_KEPT_VIEWS = 256
"""Shapes whose views are kept: steps that decode have few, others hardly ever the same again."""

_TURNS = 2
"""Host buffers that take turns: one is written to while the other is being sent."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The lengths of a step's arrays."""

    tokens: int
    sequences: int
    width: int  # blocks in the table
    sampled: int
    copies: int = 0

    @classmethod
    def of(cls, step: Step) -> StepShape:
        """Those of a step as it is."""
        copies = 0 if step.copies is None else len(step.copies)
        sequences, width = step.block_table.shape
        return cls(step.num_tokens, sequences, width, step.sample_at.shape[0], copies)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of tokens, positions, slots, query_start, context_len, block_table, sample_at, copies."""
        t, b = self.tokens, self.sequences
        return t, t, t, b + 1, b, b * self.width, self.sampled, 2 * self.copies

    @property
    def ends(self) -> list[int]:
        """Where the room of each array ends in a buffer."""
        return list(accumulate(-(-size // _ALIGNED) * _ALIGNED for size in self.sizes))


class Staging:
    """Buffers on both sides; the device's stays where it is until a larger step comes."""

    def __init__(self, device: torch.device, size: int = 0) -> None:
        """size: int32 numbers that there is room for."""
        self.device = device
        self._make(size)

    def _make(self, size: int) -> None:
        pinned = self.device.type == "cuda"
        self._device = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._hosts = [
            torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(_TURNS)
        ]
        self._sent: list[torch.cuda.Event | None] = [None] * _TURNS
        self._turn = 0
        self._views: dict[StepShape, tuple[Tensor, ...]] = {}

    @property
    def address(self) -> int:
        """Of the buffer on the device: a graph that was recorded over another one can't be used."""
        return self._device.data_ptr()

    def send(self, step: Step, shape: StepShape | None = None) -> Step:
        """The step on the device, padded to `shape`; good until the next one is sent."""
        shape = shape or StepShape.of(step)
        ends = shape.ends
        if ends[-1] > len(self._device):
            self._make(2 * ends[-1])
        self._turn = (self._turn + 1) % _TURNS
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # two steps ago: no wait, unless steps come unread
        host = self._hosts[self._turn]
        _lay_out(host.numpy(), step, shape, ends)
        self._device[: ends[-1]].copy_(host[: ends[-1]], non_blocking=True)
        if self.device.type == "cuda":
            sent = self._sent[self._turn] or torch.cuda.Event()
            sent.record()
            self._sent[self._turn] = sent
        return self._step(shape)

    def _step(self, shape: StepShape) -> Step:
        found = self._views.get(shape)
        if found is None:
            starts = [0, *shape.ends]
            parts = [
                self._device[at : at + size] for at, size in zip(starts, shape.sizes, strict=False)
            ]
            parts[5] = parts[5].view(shape.sequences, shape.width)
            parts[7] = parts[7].view(-1, 2)
            while len(self._views) >= _KEPT_VIEWS:
                del self._views[next(iter(self._views))]
            found = self._views[shape] = tuple(parts)
        if shape.copies:
            return ForkedStep(*found)
        return Step(*found[:7])


def _lay_out(
    host: np.ndarray[tuple[int], np.dtype[np.int32]], step: Step, shape: StepShape, ends: list[int]
) -> None:
    """Write a step's arrays where they go, and what stands beyond them."""
    tokens, sequences = step.num_tokens, step.num_sequences
    padded = shape.tokens > tokens or shape.sequences > sequences
    if padded or shape.width > step.block_table.shape[1]:
        host[: ends[-1]] = 0
        host[ends[1] + tokens : ends[1] + shape.tokens] = -1  # slots
        last = int(step.query_start[-1])
        host[ends[2] : ends[2] + shape.sequences + 1] = last  # query_start: nothing follows
    arrays = (
        step.tokens, step.positions, step.slots, step.query_start, step.context_len,
    )  # fmt: skip
    for array, at in zip(arrays, (0, *ends), strict=False):
        host[at : at + len(array)] = array.numpy()
    table = host[ends[4] : ends[4] + shape.sequences * shape.width]
    held = step.block_table.numpy()
    table.reshape(shape.sequences, shape.width)[:sequences, : held.shape[1]] = held
    host[ends[5] : ends[5] + len(step.sample_at)] = step.sample_at.numpy()
    if step.copies is not None:
        host[ends[6] : ends[6] + 2 * shape.copies] = step.copies.numpy().ravel()

"""Rows that go from one process to the next, where each computes some layers of a step.

They go by a socket, as they lie in memory: both ends are of one kind of machine, and know how many
rows there are from the step.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from penstock.ops.registry import define_op


def bytes_of(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, as they lie."""
    if x.numel() == 0:
        return memoryview(b"")
    array: Any = x.flatten().view(torch.uint8).numpy()
    return memoryview(array)


def _fake_hand(x: Tensor, sample_at: Tensor, file: int) -> Tensor:
    return x.new_empty((sample_at.shape[0], 0), dtype=torch.float32)


@define_op("hand_on(Tensor x, Tensor sample_at, int file) -> Tensor", fake=_fake_hand)
def hand_on(x: Tensor, sample_at: Tensor, file: int) -> Tensor:
    """Give x [T, D] to whoever has the other end of the socket `file`.

    Returns [S, 0] float32, of the sampled rows nothing: what a step without logits ends with.
    Raises RuntimeError where the other end has gone.
    """
    left = bytes_of(x.contiguous())
    try:
        while left:
            left = left[os.write(file, left) :]
    except OSError as error:
        raise RuntimeError("another rank of this step has gone") from error
    return _fake_hand(x, sample_at, file)


def _fake_take(tokens: Tensor, columns: int, dtype: torch.dtype, file: int) -> Tensor:
    return tokens.new_empty((tokens.shape[0], columns), dtype=dtype)


@define_op(
    "take_over(Tensor tokens, int columns, ScalarType dtype, int file) -> Tensor", fake=_fake_take
)
def take_over(tokens: Tensor, columns: int, dtype: torch.dtype, file: int) -> Tensor:
    """What `hand_on` gives at the other end of the socket `file`: [T, columns] in `dtype`, T as
    many as tokens [T].

    Raises RuntimeError where the other end has gone.
    """
    x = _fake_take(tokens, columns, dtype, file)
    left = bytes_of(x)
    while left:
        found = os.read(file, len(left))
        if not found:
            raise RuntimeError("another rank of this step has gone")
        left[: len(found)] = found
        left = left[len(found) :]
    return x

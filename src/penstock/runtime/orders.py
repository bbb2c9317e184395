"""What the first of several ranks tells the others: how it is written and read.

Once they run, ranks hear bytes alone: a kind, sizes, and arrays of int32. Each does what it is told
in the order in which it is told, and answers nothing; a step's ranks meet in the step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.step import ForkedStep, Step

_HEAD = struct.Struct("<7i")


READY, ANSWER, ERROR = b"ready", b"answer", b"error"
"""What a rank says first, before a `Ready`, the bytes of an array, or of what it has raised."""

FAILED = 3
"""The exit code of a rank that has said what it raised."""

GONE = "another rank of this step has gone"
"""What operators of `ops.ranks` and `ops.stages` raise where another rank doesn't come."""


class Kind(IntEnum):
    """What is to be done."""

    STEP = 0  # with logits at the end
    LARGEST = 1  # a step with each row's largest logit
    HIDDEN = 2  # a step with hidden states at the end
    COPY = 3
    SWAP_OUT = 4
    SWAP_IN = 5


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a rank is told first."""

    config: EngineConfig
    folder: Path  # of the model
    rank: int  # of its stage
    stage: int
    cpus: tuple[int, ...]  # that it runs on; empty: any
    weights: str = ""  # of a stage on another machine: what its model must have
    after: str | None = None  # and the address of the next stage


@dataclass(frozen=True, slots=True)
class Ready:
    """What a rank says when it has done what it was told before it runs."""

    finds_largest: bool = False  # whether `Kind.LARGEST` can be asked of it
    most_blocks: int | None = (
        None  # of the cache that its machine has room for; None: as it is here
    )


def of_step(step: Step, kind: Kind, more: bool = False) -> bytes:
    """A step without adapters, and what is wanted of it; more: with that of the next step."""
    copies = step.copies
    arrays = [
        step.tokens,
        step.positions,
        step.slots,
        step.query_start,
        step.context_len,
        step.block_table.contiguous(),
        step.sample_at,
        *([] if copies is None else [copies]),
    ]
    head = _HEAD.pack(
        kind,
        step.num_tokens,
        step.num_sequences,
        step.block_table.shape[1],
        step.sample_at.shape[0],
        -1 if copies is None else copies.shape[0],
        more,
    )
    return b"".join([head, *(array.numpy().tobytes() for array in arrays)])


def of_pairs(kind: Kind, pairs: Sequence[tuple[int, int]]) -> bytes:
    """Blocks and where they go."""
    array = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)
    return _HEAD.pack(kind, len(array), 0, 0, 0, 0, 0) + array.numpy().tobytes()


def kind_of(order: bytearray) -> Kind:
    """Of what is to be done."""
    return Kind(_HEAD.unpack_from(order)[0])


def has_more(order: bytearray) -> bool:
    """Whether what is wanted of a step comes with that of the next."""
    return bool(_HEAD.unpack_from(order)[6])


def read_pairs(order: bytearray) -> list[tuple[int, int]]:
    """What `of_pairs` was given."""
    rows: list[list[int]] = _ints(order, _HEAD.size, (_HEAD.unpack_from(order)[1], 2)).tolist()
    return [(a, b) for a, b in rows]


def read_step(order: bytearray) -> Step:
    """What `of_step` was given; its arrays lie in `order`."""
    _, tokens, sequences, width, sampled, copied, _ = _HEAD.unpack_from(order)
    shapes: list[tuple[int, ...]] = [
        (tokens,), (tokens,), (tokens,), (sequences + 1,), (sequences,), (sequences, width),
        (sampled,), *([] if copied < 0 else [(copied, 2)]),
    ]  # fmt: skip
    found, at = [], _HEAD.size
    for shape in shapes:
        array = _ints(order, at, shape)
        at += array.nbytes
        found.append(array)
    return Step(*found) if copied < 0 else ForkedStep(*found)


def _ints(order: bytearray, at: int, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.zeros(shape, dtype=torch.int32)
    return torch.frombuffer(order, dtype=torch.int32, count=count, offset=at).view(shape)

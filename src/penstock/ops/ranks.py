"""Rows that several processes have parts of: each puts its own where all can read it.

The processes of one step (ranks) share a `meeting`, a piece of memory that all of them map. Its
first 8,192 bytes are lines of 64: of the first line, word 0 says that somebody has gone; of line
1 + r, word 0 counts the meetings that rank r has come to, and word 1 those that sleep until it
does. Two places follow, used in turns, each half of what is left in whole lines. A rank writes its
part, counts, waits until every other rank's count is as high, and reads. It is at the next meeting
before it writes to the same place again, and so has everybody been after reading.

Nothing is added up, so that a value doesn't depend on who computed it.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch
from torch import Tensor

from penstock.ops.embedding import embedding, embedding_like
from penstock.ops.registry import define_op

HEADER = 8192
"""Bytes of a meeting before its two places."""

_LINE = 16  # words


def _words(meeting: Tensor) -> Tensor:
    return meeting[:HEADER].view(torch.int32).view(-1, _LINE)


def place_of(meeting: Tensor, rank: int) -> Tensor:
    """The place that `rank`'s next meeting is about."""
    size = (len(meeting) - HEADER) // 2 // 64 * 64
    first = HEADER + size * (int(_words(meeting)[1 + rank, 0]) & 1)
    return meeting[first : first + size]


def meet(meeting: Tensor, rank: int, ranks: int) -> None:
    """Wait for all ranks. Raises RuntimeError where one has gone."""
    words = _words(meeting)
    count = int(words[1 + rank : 2 + rank, 0] + 1)  # which may begin again from below
    words[1 + rank, 0] = count
    while bool((words[1 : 1 + ranks, 0] - count < 0).any()):
        if int(words[0, 0]):
            raise RuntimeError("another rank of this step has gone")
        time.sleep(0)


def in_rounds(rows: int, row_bytes: int, meeting: Tensor) -> list[tuple[int, int]]:
    """First and last row of each meeting that many rows need."""
    most = (len(meeting) - HEADER) // 2 // 64 * 64 // row_bytes
    if most == 0:
        raise RuntimeError(f"a row of {row_bytes} bytes doesn't fit in a meeting's place")
    return [(first, min(first + most, rows)) for first in range(0, rows, most)]


def _fake_columns(
    x: Tensor, meeting: Tensor, bounds: Tensor, rank: int, reader: int = -1
) -> Tensor:
    return x.new_empty((x.shape[0], int(bounds[-1])))


@define_op(
    "gather_columns(Tensor x, Tensor(a!) meeting, Tensor bounds, int rank, int reader=-1) "
    "-> Tensor",
    fake=_fake_columns,
)
def gather_columns(
    x: Tensor, meeting: Tensor, bounds: Tensor, rank: int, reader: int = -1
) -> Tensor:
    """y[:, bounds[r] : bounds[r + 1]] = rank r's x; all ranks call it with as many rows.

    x [T, bounds[rank + 1] − bounds[rank]] float32 or bfloat16; meeting [bytes] uint8, shared;
    bounds [R + 1] int32 of the R ranks, from 0, never falling. reader: the only rank that is given
    the rows; another one's result is undefined. Returns [T, bounds[R]] in x.dtype.
    Cost: T·N·itemsize bytes written and read by each rank.
    Raises RuntimeError where another rank has gone, or one row has no room in the meeting.
    """
    ends = [int(b) for b in bounds]
    ranks, item, all_columns = len(ends) - 1, x.element_size(), ends[-1]
    y = x.new_empty((x.shape[0], all_columns))
    for first, last in in_rounds(x.shape[0], all_columns * item, meeting):
        rows, place = last - first, place_of(meeting, rank)
        parts = [
            place[a * rows * item : b * rows * item].view(x.dtype).view(rows, b - a)
            for a, b in pairwise(ends)
        ]
        parts[rank].copy_(x[first:last])
        meet(meeting, rank, ranks)
        if reader in (-1, rank):
            torch.cat(parts, 1, out=y[first:last])
    return y


def _fake_embedding(
    tokens: Tensor,
    weight: Tensor,
    dim: int,
    scale: float,
    weight_scale: Tensor | None,
    zero: Tensor | None,
    levels: int,
    outer: Tensor | None,
    meeting: Tensor,
    bounds: Tensor,
    rank: int,
) -> Tensor:
    return embedding_like(tokens, weight, dim, scale, weight_scale, zero, levels, outer)


@define_op(
    "gather_embedding(Tensor tokens, Tensor weight, SymInt dim, float scale, "
    "Tensor? weight_scale, Tensor? zero, int levels, Tensor? outer, Tensor(a!) meeting, "
    "Tensor bounds, int rank) -> Tensor",
    fake=_fake_embedding,
)
def gather_embedding(
    tokens: Tensor,
    weight: Tensor,
    dim: int,
    scale: float,
    weight_scale: Tensor | None,
    zero: Tensor | None,
    levels: int,
    outer: Tensor | None,
    meeting: Tensor,
    bounds: Tensor,
    rank: int,
) -> Tensor:
    """`embedding` of a table of which rank r has the rows bounds[r] to bounds[r + 1].

    tokens [T] int32, the same in all ranks; weight and what follows it are this rank's, as
    `embedding` takes them; the rest as in `gather_columns`. Returns [T, dim] in all ranks.
    """
    ends = [int(b) for b in bounds]
    like = embedding_like(tokens, weight, dim, scale, weight_scale, zero, levels, outer)
    y = torch.empty(like.shape, dtype=like.dtype)
    row_bytes = dim * y.element_size()
    for first, last in in_rounds(len(tokens), row_bytes, meeting):
        place = place_of(meeting, rank)[: (last - first) * row_bytes].view(y.dtype).view(-1, dim)
        ids = tokens[first:last]
        own = ((ids >= ends[rank]) & (ids < ends[rank + 1])).nonzero().squeeze(1)
        local = ids[own] - ends[rank]
        place[own] = embedding(local, weight, dim, scale, weight_scale, zero, levels, outer)
        meet(meeting, rank, len(ends) - 1)
        y[first:last] = place
    return y

"""Reading memory as fast as it can be read: the sum of a large buffer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 16
"""For each multiprocessor: enough that all of its threads have loads on their way."""
_TILE = 4096


@triton.jit
def _sum(x, partial, n, TILE: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    first = program * TILE
    within = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.float32)
    while first < n:
        at = first + within
        total += tl.load(x + at, mask=at < n, other=0.0)
        first += tl.num_programs(0) * TILE
    tl.store(partial + program, tl.sum(total))


def read_sum(x: Tensor, programs: int) -> Tensor:
    """Sums of the parts of x [n] float32, one a program; every byte is read once."""
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    _sum[(programs,)](x, partial, x.numel(), TILE=_TILE, num_warps=8)
    return partial

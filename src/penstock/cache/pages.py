"""Memory that is zero and takes room only where it is written to."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`torch.zeros`, but of pages that the system gives when they are first written.

    torch fills what it allocates: seconds for a cache of some gigabytes, most of which a run may
    never touch.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)

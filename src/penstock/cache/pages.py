"""Memory that is zero and takes room only where it is written to."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

LARGE = 16 * 1024 * 1024
"""Bytes from which memory comes in pages of 2 MB where there are any: reading looks up fewer."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`torch.zeros`, but of pages that the system gives when they are first written.

    torch fills what it allocates: seconds for a cache of some gigabytes, most of which a run may
    never touch.
    """
    size = math.prod(shape) * dtype.itemsize
    if size == 0:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)

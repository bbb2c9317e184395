"""Memory in which parts of a matrix are joined before it is packed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

SMALL = 1 << 20
"""Bytes up to which it isn't worth it."""


class Room:
    """Joins tensors in memory that is used again for the next ones.

    The system zeroes a page before anyone may write to it: in fresh memory that took longer than
    the copy, a third of the time that a model of 0.5B parameters took to load.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """`torch.cat` of them, good until the next call.

        Raises RuntimeError where they don't fit.
        """
        first = tensors[0]
        size = sum(tensor.nbytes for tensor in tensors)
        alike = all(t.dtype is first.dtype and t.is_cpu and t.dim() > 0 for t in tensors)
        if size <= SMALL or not alike:
            return torch.cat(list(tensors))
        if self._bytes.nbytes < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        shape = sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]
        if math.prod(shape) * first.itemsize != size:
            return torch.cat(list(tensors))  # which says what doesn't fit
        joined = self._bytes[:size].view(first.dtype).view(shape)
        return torch.cat(list(tensors), out=joined)

    def leave_to(self, module: nn.Module) -> None:
        """What `module` keeps as it was joined is its own from here on, and as large as it is."""
        mine = self._bytes.untyped_storage().data_ptr()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.untyped_storage().data_ptr() == mine:
                if tensor.nbytes < self._bytes.nbytes:
                    tensor.data = tensor.detach().clone()
                else:
                    self._bytes = torch.empty(0, dtype=torch.uint8)

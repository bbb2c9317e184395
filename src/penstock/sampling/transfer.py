"""What goes to the device of the logits, and what comes back, without waiting for it.

Up: through pinned memory, which the copy engine reads while the host goes on. Down: all that a step
has to say is gathered on the device and copied once; an event says when it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Part = npt.NDArray[Any]


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host on a device; what is on its way must be left as it is only until here."""
    if device.type == "cpu":
        return values
    if device.type != "cuda" or not values.numel():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class Gathered:
    """Tensors of 32 bits a number that are on their way to the host, as one."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """parts: float32 or int32, of any shapes."""
        self._forms = [(part.dtype, part.shape) for part in parts]
        words = torch.cat([part.contiguous().view(torch.int32).view(-1) for part in parts])
        self._arrived: torch.cuda.Event | None = None
        self._words = words
        if words.is_cuda:
            self._words = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            self._words.copy_(words, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(words.device))

    def wait(self) -> list[Part]:
        """The parts, in their order, as soon as they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        words, first, found = self._words.numpy(), 0, []
        for dtype, shape in self._forms:
            part = words[first : first + shape.numel()]
            first += shape.numel()
            kind = np.float32 if dtype is torch.float32 else np.int32
            found.append(part.view(kind).reshape(shape))
        return found

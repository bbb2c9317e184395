"""Names on a GPU's timeline: ranges that Nsight Systems shows above the kernels they queue.

    nvtx.enable()
    with nvtx.span("schedule"):
        …

Nothing happens until `enable` is called, and a span then costs under a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from penstock.errors import KernelError
from penstock.hardware import why_no_gpu

_state = {"on": False}
_NOTHING = nullcontext()


def enable(on: bool = True) -> None:
    """Give spans names from now on, or no longer. Raises KernelError where there is no GPU."""
    reason = why_no_gpu() if on else ""
    if reason:
        raise KernelError(f"NVTX ranges lie on a GPU's timeline, but {reason}. Leave them out.")
    _state["on"] = on


def enabled() -> bool:
    """Whether spans are named."""
    return _state["on"]


def span(name: str) -> AbstractContextManager[None]:
    """What runs inside has this name on the timeline; nothing while it isn't enabled."""
    return _range(name) if _state["on"] else _NOTHING


@contextmanager
def _range(name: str) -> Iterator[None]:
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()

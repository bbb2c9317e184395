"""What the Triton kernels share: how they are registered, and what differs in the interpreter.

One file an operator, named after the file of its reference. A launcher takes what the operator
takes (`ops`), shapes the grid and the tiles by sizes alone, so that nothing waits for the GPU, and
starts kernels. Whatever a row's result is computed with, tiles along K or along the keys included,
depends on the matrices and the cache, never on the other rows: the bits are the same in any batch.

Environment:
    TRITON_INTERPRET   1: Triton runs its kernels in Python, on CPU tensors, for tests
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from penstock.ops.registry import NAMESPACE

F = TypeVar("F", bound=Callable[..., Any])

INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in the interpreter."""


if INTERPRETED:
    from penstock.kernels.triton import interpreting

    interpreting.prepare()

_launchers: dict[str, Callable[..., Any]] = {}
_library = torch.library.Library(NAMESPACE, "IMPL")
_registered: set[str] = set()


def implement(name: str) -> Callable[[F], F]:
    """Mark the decorated launcher as an operator's implementation."""

    def keep(launcher: F) -> F:
        _launchers[name] = launcher
        return launcher

    return keep


def launchers() -> dict[str, Callable[..., Any]]:
    """Every operator's launcher, by name."""
    return dict(_launchers)


def register(key: str) -> None:
    """Make the dispatcher choose these for tensors of `key`: CUDA, or CPU where interpreted."""
    if key in _registered:
        return
    _registered.add(key)
    for name, launcher in _launchers.items():
        _library.impl(name, launcher, key)


def cdiv(n: int, by: int) -> int:
    """n / by, rounded up: Triton's own takes microseconds outside of a kernel."""
    return -(-n // by)


def power_of_2(n: int, least: int = 16) -> int:
    """The least power of two that is at least n and `least`: what a tile's sides are."""
    return max(least, 1 << max(n - 1, 0).bit_length())


FEW_ROWS = 64
_EARLY: dict[str, Any] = {"launch_pdl": True}
_IN_TURN: dict[str, Any] = {}


def early(rows: int) -> dict[str, Any]:
    """How a kernel that calls `take_turn` is launched: with few rows, it is started while those
    before it still run (programmatic dependent launch, CUDA C++ Programming Guide 10.2).

    Kernels of many rows have no room to spare for those that wait.
    """
    return _EARLY if rows <= FEW_ROWS else _IN_TURN


@triton.jit
def take_turn():
    """Lets the kernel that follows be started, and waits for all before this one to have ended."""
    if not INTERPRETED:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def wait_turn():
    """Waits for all kernels before this one to have ended, of one that fills the multiprocessors.

    The one that follows is started when this has ended: started earlier, its programs would crowd
    on those multiprocessors that are free first (a product of 256 programs took 38 µs, not 30).
    """
    if not INTERPRETED:
        cuda.gdc_wait()


@triton.jit
def dot(a, b, total):
    """total + a · b, summed in float32.

    The interpreter multiplies bfloat16 as if it were integers: there operands are widened first,
    which changes no product.
    """
    if INTERPRETED:
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")

"""Factors of rows, where no product takes them along."""

from __future__ import annotations

from torch import Tensor

from penstock.ops.registry import define_op


def _fake_multiply(y: Tensor, x: Tensor, first: int = 0) -> None:
    return None


@define_op("multiply_(Tensor(a!) y, Tensor x, int first=0) -> ()", fake=_fake_multiply)
def multiply_(y: Tensor, x: Tensor, first: int = 0) -> None:
    """y *= x[:, first : first + N] in place, rounded once.

    y [T, N] and x [T, M] of one dtype, M at least first + N; rows may be strided.
    Cost: 3·T·N·itemsize bytes moved; in cache.
    """
    y.copy_(y.float() * x[:, first : first + y.shape[1]].float())


def _fake_scale(y: Tensor, number: Tensor) -> None:
    return None


@define_op("scale_(Tensor(a!) y, Tensor number) -> ()", fake=_fake_scale)
def scale_(y: Tensor, number: Tensor) -> None:
    """y *= number in place, rounded once; y [T, N], rows may be strided; number [1] float32.

    Cost: 2·T·N·itemsize bytes moved; in cache.
    """
    y.copy_(y.float() * number)

"""Rows that outlive a step, or come from beside it: how one model's states reach another's.

A program's values are gone when it ends, but for its logits. What else is wanted of it is kept in
a store, a plain matrix with room for the rows of the largest step.
"""

from __future__ import annotations

from torch import Tensor

from penstock.ops.registry import define_op


def _fake_keep(x: Tensor, store: Tensor, column: int) -> None:
    return None


@define_op("keep_rows(Tensor x, Tensor(a!) store, int column) -> ()", fake=_fake_keep)
def keep_rows(x: Tensor, store: Tensor, column: int) -> None:
    """store[: T, column : column + D] = x; x [T, D] and store [N, W] of one dtype, T ≤ N."""
    store[: x.shape[0], column : column + x.shape[1]].copy_(x)


def _fake_kept(tokens: Tensor, store: Tensor) -> Tensor:
    return store.new_empty((tokens.shape[0], store.shape[1]))


@define_op("kept_rows(Tensor tokens, Tensor store) -> Tensor", fake=_fake_kept)
def kept_rows(tokens: Tensor, store: Tensor) -> Tensor:
    """The first T rows of store [N, W], for a step of tokens [T], T ≤ N; a copy."""
    return store[: tokens.shape[0]].clone()

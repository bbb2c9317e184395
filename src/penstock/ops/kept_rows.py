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


def _fake_place(x: Tensor, store: Tensor, wanted: Tensor) -> None:
    return None


@define_op("place_rows_(Tensor(a!) x, Tensor store, Tensor wanted) -> ()", fake=_fake_place)
def place_rows_(x: Tensor, store: Tensor, wanted: Tensor) -> None:
    """x[t] = store[t] where wanted[t] isn't 0, in place: an image's rows among those of a text.

    x [T, D] and store [N, D] of one dtype, T ≤ N; wanted [N] int32.
    """
    count = x.shape[0]
    at = wanted[:count].nonzero().squeeze(1)
    x[at] = store[at]

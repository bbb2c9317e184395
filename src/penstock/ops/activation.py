"""Activations of the feed-forward block, and the soft cap."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.registry import define_op


def _fake_gated(x: Tensor, tanh: bool = False) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1] // 2))


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[1] // 2
    return x[:, :half].float(), x[:, half:].float()


@define_op("silu_mul(Tensor x) -> Tensor", fake=_fake_gated)
def silu_mul(x: Tensor) -> Tensor:
    """silu(gate) · up.

    x [T, 2·I], gate first; returns [T, I] in x.dtype; float32 inside, rounded once.
    silu(g) = g / (1 + exp(−g)). Cost: 3·T·I·itemsize bytes moved; memory-bound.
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = _halves(x)
    return (functional.silu(gate) * up).to(x.dtype)


def _gelu(x: Tensor, tanh: bool) -> Tensor:
    return functional.gelu(x, approximate="tanh" if tanh else "none")


@define_op("gelu_mul(Tensor x, bool tanh) -> Tensor", fake=_fake_gated)
def gelu_mul(x: Tensor, tanh: bool) -> Tensor:
    """gelu(gate) · up, with the tanh approximation or the exact error function.

    x [T, 2·I], gate first; returns [T, I] in x.dtype; float32 inside, rounded once.
    Source: Hendrycks & Gimpel 2016, arXiv:1606.08415.
    """
    gate, up = _halves(x)
    return (_gelu(gate, tanh) * up).to(x.dtype)


def _fake_same(x: Tensor, tanh: bool) -> Tensor:
    return x.new_empty(x.shape)


@define_op("gelu(Tensor x, bool tanh) -> Tensor", fake=_fake_same)
def gelu(x: Tensor, tanh: bool) -> Tensor:
    """gelu(x), with the tanh approximation or the exact error function; x [T, I]."""
    return _gelu(x.float(), tanh).to(x.dtype)


def _fake_cap(x: Tensor, cap: float) -> None:
    return None


@define_op("softcap_(Tensor(a!) x, float cap) -> ()", fake=_fake_cap)
def softcap_(x: Tensor, cap: float) -> None:
    """x = cap · tanh(x / cap), in place; x [T, V] float32.

    Source: Gemma 2, arXiv:2408.00118.
    """
    x.copy_(torch.tanh(x / cap) * cap)

"""A gate that each token has for a whole block."""

from __future__ import annotations

from torch import Tensor

from penstock.ops.registry import define_op


def _fake(y: Tensor, x: Tensor, weight: Tensor) -> None:
    return None


@define_op("gate_rows_(Tensor(a!) y, Tensor x, Tensor weight) -> ()", fake=_fake)
def gate_rows_(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """y[t] *= sigmoid(x[t] · weight) in place, rounded once.

    y [T, N] and x [T, D] of one dtype, rows may be strided; weight [D] float32.
    Cost: (2·N + D)·T·itemsize bytes moved; in cache.
    Source: `shared_expert_gate` of Qwen2-MoE, arXiv:2407.10671.
    """
    share = (x.float() @ weight).sigmoid()
    y.copy_(y.float() * share.unsqueeze(-1))

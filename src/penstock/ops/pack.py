"""Unquantized weights to panels."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.panels import alternate, pack_panels, panel_shape
from penstock.ops.registry import define_op


def _check(weight: Tensor, gated: bool) -> None:
    if gated and weight.shape[0] % 2:
        raise RuntimeError(
            f"pack: weight with a gate has two halves, this one {weight.shape[0]} rows"
        )


def _fake(weight: Tensor, dtype: torch.dtype, gated: bool = False) -> Tensor:
    n, k = weight.shape
    panels, *rest = panel_shape(n // 2 if gated else n, k, dtype)
    return weight.new_empty((2 * panels if gated else panels, *rest), dtype=dtype)


@define_op("pack(Tensor weight, ScalarType dtype, bool gated=False) -> Tensor", fake=_fake)
def pack(weight: Tensor, dtype: torch.dtype, gated: bool = False) -> Tensor:
    """The panels (`ops.panels`) of a matrix in `dtype`, float32 or bfloat16, rounded once.

    weight [N, K] float32, bfloat16 or float16, rows may be strided; gated: gate above up, [2·N, K],
    whose panels alternate. Returns [N/16, K/v, 16, v], twice as many when gated.
    Cost: the weight's bytes read and the panels' written.
    """
    _check(weight, gated)
    parts = [pack_panels(part.to(dtype)) for part in (weight.chunk(2) if gated else (weight,))]
    return alternate(*parts) if gated else parts[0]

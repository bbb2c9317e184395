"""Activation and gate, where no product takes them along."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.linear import activate, gated_by
from penstock.ops.panels import COLUMNS, round_up
from penstock.ops.registry import define_op


def _fake_gate(
    x: Tensor,
    activation: int,
    gated: bool,
    out_features: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], out_features), dtype=out_dtype or x.dtype)


@define_op(
    "gate(Tensor x, int activation, bool gated, SymInt out_features, "
    "ScalarType? out_dtype=None) -> Tensor",
    fake=_fake_gate,
)
def gate(
    x: Tensor,
    activation: int,
    gated: bool,
    out_features: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = act(x), or act(gate) · up.

    x [T, N] float32 or bfloat16, rows may be strided; activation: an index into ACTIVATIONS.
    gated: x [T, 2·⌈N/16⌉·16], 16 columns of gate and 16 of up in turns: what `linear` makes of a
    gated matrix's panels when it takes neither activation nor gate along. Returns
    [T, N = out_features] in `out_dtype` (x.dtype if None), rounded once.
    `linear` with an activation equals `linear` without one and this, bit for bit.
    Cost: the bytes of x and y; in cache.
    Source: gated units, Shazeer 2020, arXiv:2002.05202.
    """
    rows = x.float()
    if not gated:
        return activate(rows, activation).to(out_dtype or x.dtype)
    halves = rows.unflatten(1, (-1, 2, COLUMNS))
    first, second = (halves[:, :, i].flatten(1)[:, :out_features] for i in (0, 1))
    return gated_by(first, second, activation).to(out_dtype or x.dtype)


def _fake_alternate(bias: Tensor) -> Tensor:
    return bias.new_empty((2 * round_up(bias.shape[0] // 2, COLUMNS),))


@define_op("alternate(Tensor bias) -> Tensor", fake=_fake_alternate)
def alternate(bias: Tensor) -> Tensor:
    """A gated matrix's bias in the order of its panels: 16 of gate, 16 of up in turns.

    bias [2·N]: gate's, then up's. Returns [2·⌈N/16⌉·16], zeros where panels are padded.
    """
    halves = bias.view(2, -1)
    whole = functional.pad(halves, (0, -halves.shape[1] % COLUMNS))
    panels: Tensor = whole.view(2, -1, COLUMNS).transpose(0, 1).flatten()
    return panels

"""A short causal convolution between two gates: attention to the last few tokens alone.

A row is b, c and x of each channel. With u = b · x, rounded to the rows' dtype, a token gives
    y = c · (bias + Σ w · u)
over its own u and those of the W − 1 tokens before it, the earliest first; none counts as 0.

What a sequence is at a token is its last W − 1 u. They lie in numbered slots, N of them:
    inputs [N, W − 1, C]   the earliest first
A step reads slots and writes others, as in `ops.delta`.
Source: LFM2's technical report, arXiv:2511.23404.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.ops.registry import define_op
from penstock.ops.states import ragged, slots_by_row


def _fake(
    mixed: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    query_start: Tensor,
    context_len: Tensor,
    states: Tensor | None,
    kept: Tensor | None,
    inputs: Tensor,
) -> Tensor:
    return mixed.new_empty((mixed.shape[0], conv.shape[1]))


@define_op(
    "short_conv(Tensor mixed, Tensor conv, Tensor? bias, Tensor query_start, Tensor context_len, "
    "Tensor? states, Tensor? kept, Tensor(a!) inputs) -> Tensor",
    fake=_fake,
)
def short_conv(
    mixed: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    query_start: Tensor,
    context_len: Tensor,
    states: Tensor | None,
    kept: Tensor | None,
    inputs: Tensor,
) -> Tensor:
    """A ragged batch through the convolution, from its projection to what `out` multiplies.

    mixed [T, 3·C]: b, c, x of all channels; rows may be strided. conv [W, C] float32, the weight of
    the latest token last; bias [C] float32. query_start, context_len, states and kept as in
    `delta_rule`. Returns [T, C], rounded once. Sums run by float32 FMA from the bias, or 0, in the
    order of tokens, whichever of them came with a step before.
    Cost: 2·W + 2 FLOPs a channel and token; inputs read and written once a step.
    """
    channels = conv.shape[1]
    b, c, x = (part.float() for part in mixed.split(channels, 1))
    u = (b * x).to(mixed.dtype)
    out = mixed.new_empty((mixed.shape[0], channels))
    keeps = slots_by_row(kept)
    for first, last, slot in ragged(query_start, context_len, states):
        before = inputs[slot] if slot >= 0 else inputs.new_zeros(inputs.shape[1:])
        rows = torch.cat((before, u[first:last]))
        summed = (rows.float().unfold(0, conv.shape[0], 1) * conv.t()).sum(-1)  # [t, C, W] → [t, C]
        if bias is not None:
            summed = summed + bias
        out[first:last] = (c[first:last] * summed).to(out.dtype)
        for row in range(first, last):
            for to in keeps.get(row, ()):
                inputs[to] = rows[row - first + 1 : row - first + conv.shape[0]]
    return out

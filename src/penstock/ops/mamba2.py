"""Mamba 2: attention whose memory of a sequence is one matrix a head, that fades.

A head's state S [N, P] takes up values x under keys B, and is read by C. With a token's step
δ = softplus(d + shift), one number of each head,
    S ← exp(−A·δ)·S + B ⊗ δ·x,   y = Sᵀc + D·x
x, B and C come through a short causal convolution and SiLU; heads of a group share B and C. What
comes out is y · SiLU(z), and its root-mean-square norm over each group.

What a sequence is at a token lies in numbered slots, as in `ops.delta`, M of them:
    state  [M, H, P/16, N, 16]  float32: panels of 16 columns of S
    inputs [M, W − 1, C]        of the convolution, rows as they came, the earliest first
Source: Dao & Gu 2024, arXiv:2405.21060.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.panels import COLUMNS
from penstock.ops.registry import define_op
from penstock.ops.states import ragged, slots_by_row


def _fake(
    mixed: Tensor,
    steps: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    rates: Tensor,
    shift: Tensor,
    skip: Tensor,
    norm: Tensor,
    eps: float,
    query_start: Tensor,
    context_len: Tensor,
    states: Tensor | None,
    kept: Tensor | None,
    state: Tensor,
    inputs: Tensor,
) -> Tensor:
    return mixed.new_empty((mixed.shape[0], norm.shape[0]))


@define_op(
    "mamba2(Tensor mixed, Tensor steps, Tensor conv, Tensor? bias, Tensor rates, Tensor shift, "
    "Tensor skip, Tensor norm, float eps, Tensor query_start, Tensor context_len, Tensor? states, "
    "Tensor? kept, Tensor(a!) state, Tensor(b!) inputs) -> Tensor",
    fake=_fake,
)
def mamba2(
    mixed: Tensor,
    steps: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    rates: Tensor,
    shift: Tensor,
    skip: Tensor,
    norm: Tensor,
    eps: float,
    query_start: Tensor,
    context_len: Tensor,
    states: Tensor | None,
    kept: Tensor | None,
    state: Tensor,
    inputs: Tensor,
) -> Tensor:
    """A ragged batch through the states, from its projections to what `out` multiplies.

    mixed [T, 2·H·P + 2·G·N]: z of all heads, then x, then B of each group and C, one projection;
    rows may be strided. H is a multiple of G. steps [T, H] float32: d. conv [W, C] float32,
    C = H·P + 2·G·N, the weight of the latest input last; bias [C] float32; rates, shift and skip
    [H] float32: A, what is added to d, and D; norm [H·P] float32.
    query_start, context_len, states and kept as in `delta_rule`.
    Returns [T, H·P], rounded before the norm and after it.
    Sums over N run by float32 FMA in the order of n, those of the norm over 16 lanes. It is one
    token after another however many come at once, so chunks change no bit.
    Cost: 5·H·P·N FLOPs a token; states read and written once a step.
    """
    _, heads, panels, key_dim, columns = state.shape
    inner, value_dim = norm.shape[0], panels * columns
    groups = (mixed.shape[1] - 2 * inner) // (2 * key_dim)
    out = mixed.new_empty((mixed.shape[0], inner))
    step = functional.softplus(steps + shift)
    fade = (-rates * step).exp()
    keeps = slots_by_row(kept)
    for first, last, slot in ragged(query_start, context_len, states):
        before = inputs[slot] if slot >= 0 else inputs.new_zeros(inputs.shape[1:])
        now = state.new_zeros((heads, key_dim, value_dim))
        if slot >= 0:
            now = state[slot].transpose(1, 2).flatten(2)
        rows = torch.cat((before, mixed[first:last, inner:]))
        windows = rows.float().unfold(0, conv.shape[0], 1)  # [t, C, W]
        turned = (windows * conv.t()).sum(-1)
        turned = functional.silu(turned if bias is None else turned + bias)
        x, key, ask = turned.split((inner, groups * key_dim, groups * key_dim), 1)
        x = x.unflatten(1, (heads, value_dim))
        key, ask = (
            part.unflatten(1, (groups, key_dim)).repeat_interleave(heads // groups, 1)
            for part in (key, ask)
        )
        for t in range(last - first):
            at = first + t
            taken = (x[t] * step[at, :, None]).unsqueeze(1)
            now = now * fade[at, :, None, None] + key[t].unsqueeze(-1) * taken
            y = torch.einsum("hnp,hn->hp", now, ask[t]) + skip[:, None] * x[t]
            y = (y.flatten() * functional.silu(mixed[at, :inner].float())).to(out.dtype)
            y = y.float().view(groups, -1)
            y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
            out[at] = (y.flatten() * norm).to(out.dtype)
            for to in keeps.get(at, ()):
                state[to] = now.unflatten(2, (-1, COLUMNS)).transpose(1, 2)
                inputs[to] = rows[t + 1 : t + conv.shape[0]]
    return out

"""The gated delta rule: attention whose memory of a sequence is one matrix a head.

A head's state S [Dk, Dv] holds values v under keys k. Each token lets some of it fade, reads what
its key stands for, and puts its own value there:
    S ← α·S,   S ← S + k ⊗ β·(v − Sᵀk),   o = Sᵀq
with α = exp(−A · softplus(a + shift)) and β = strength · sigmoid(b), both of one head and token.
q, k and v come through a short causal convolution and SiLU; q and k are made unit vectors, and q
is divided by √Dk.

What a sequence is at a token is its state and the last W − 1 inputs of the convolution. Both lie
in numbered slots, N of them:
    state  [N, Hv, Dv/16, Dk, 16]  float32: panels of 16 columns of S
    inputs [N, W − 1, C]           rows as they came, the earliest first
A step reads slots and writes others, so that what failed can be computed again.
Source: Yang et al. 2024, arXiv:2412.06464.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.ops.panels import COLUMNS
from penstock.ops.registry import define_op
from penstock.ops.states import ragged, slots_by_row

_EPS = 1e-6
"""Beside the squares of queries and keys, as they are made unit vectors."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def turned(self) -> int:
        """Columns that go through the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


def _sizes(mixed: Tensor, state: Tensor) -> _Sizes:
    _, heads, panels, key_dim, columns = state.shape
    values = heads * panels * columns
    return _Sizes((mixed.shape[1] - 2 * values) // (2 * key_dim), heads, key_dim, panels * columns)


def _fake(
    mixed: Tensor,
    gates: Tensor,
    conv: Tensor,
    rates: Tensor,
    shift: Tensor,
    norm: Tensor,
    eps: float,
    query_start: Tensor,
    context_len: Tensor,
    states: Tensor | None,
    kept: Tensor | None,
    state: Tensor,
    inputs: Tensor,
    strength: float = 1.0,
) -> Tensor:
    return mixed.new_empty((mixed.shape[0], state.shape[1] * state.shape[2] * COLUMNS))


@define_op(
    "delta_rule(Tensor mixed, Tensor gates, Tensor conv, Tensor rates, Tensor shift, Tensor norm, "
    "float eps, Tensor query_start, Tensor context_len, Tensor? states, Tensor? kept, "
    "Tensor(a!) state, Tensor(b!) inputs, float strength=1.0) -> Tensor",
    fake=_fake,
)
def delta_rule(
    mixed: Tensor,
    gates: Tensor,
    conv: Tensor,
    rates: Tensor,
    shift: Tensor,
    norm: Tensor,
    eps: float,
    query_start: Tensor,
    context_len: Tensor,
    states: Tensor | None,
    kept: Tensor | None,
    state: Tensor,
    inputs: Tensor,
    strength: float = 1.0,
) -> Tensor:
    """A ragged batch through the gated delta rule, from its projections to what `out` multiplies.

    mixed [T, 2·Hk·Dk + 2·Hv·Dv]: heads of q, of k, of v, and of z, one projection; rows may be
    strided. Hv is a multiple of Hk: value heads in turn share a key head. gates [T, 2·Hv] float32:
    a of each head, then b. conv [W, C] float32, C = 2·Hk·Dk + Hv·Dv, the weight of the latest input
    last; rates and shift [Hv] float32: A, and what is added to a; norm [Dv] float32.
    strength: 1, or 2 where what a key stood for may be turned around (Grazzi et al. 2024,
    arXiv:2411.12537).
    query_start and context_len as in `Step`; states [B] int32: the slot that a sequence goes on
    from, −1 at its beginning; kept [M, 2] int32, (t, slot) by rising t: where the state after row t
    goes. Without states every sequence begins with the step, and without kept nothing is kept. No
    slot is both read and written.
    Returns [T, Hv·Dv]: of each head rms_norm(o) · norm · SiLU(z), rounded once.
    Sums over Dk run by float32 FMA in the order of k for states, over 16 lanes for lengths. It is
    one token after another however many come at once, so chunks change no bit.
    Cost: 7·Hv·Dk·Dv FLOPs a token; states read and written once a step.
    """
    sizes = _sizes(mixed, state)
    out = mixed.new_empty((mixed.shape[0], sizes.heads * sizes.value_dim))
    beta = strength * gates[:, sizes.heads :].sigmoid()
    fade = (-rates * functional.softplus(gates[:, : sizes.heads] + shift)).exp()
    keeps = slots_by_row(kept)
    for first, last, slot in ragged(query_start, context_len, states):
        before = inputs.new_zeros((conv.shape[0] - 1, sizes.turned))
        now = state.new_zeros((sizes.heads, sizes.key_dim, sizes.value_dim))
        if slot >= 0:
            before = inputs[slot]
            now = state[slot].transpose(1, 2).flatten(2)
        rows = torch.cat((before, mixed[first:last, : sizes.turned]))
        q, k, v = _turned(rows, conv, sizes)
        for t in range(last - first):
            now = now * fade[first + t, :, None, None]
            known = torch.einsum("hkv,hk->hv", now, k[t])
            change = (v[t] - known) * beta[first + t, :, None]
            now = now + k[t].unsqueeze(-1) * change.unsqueeze(-2)
            o = torch.einsum("hkv,hk->hv", now, q[t])
            z = mixed[first + t, sizes.turned :].float().view(sizes.heads, -1)
            o = o * torch.rsqrt(o.pow(2).mean(-1, keepdim=True) + eps) * norm
            out[first + t] = (o * functional.silu(z)).flatten().to(out.dtype)
            for to in keeps.get(first + t, ()):
                state[to] = now.unflatten(2, (-1, COLUMNS)).transpose(1, 2)
                inputs[to] = rows[t + 1 : t + conv.shape[0]]
    return out


def _turned(rows: Tensor, conv: Tensor, sizes: _Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q and k [t, Hv, Dk] and v [t, Hv, Dv] float32, of W − 1 rows more than t."""
    windows = rows.float().unfold(0, conv.shape[0], 1)  # [t, C, W]
    x = functional.silu((windows * conv.t()).sum(-1))
    keys = sizes.key_heads * sizes.key_dim
    q, k, v = x.split((keys, keys, sizes.heads * sizes.value_dim), 1)
    shared = sizes.heads // sizes.key_heads
    q = _unit(q.unflatten(1, (sizes.key_heads, -1))).repeat_interleave(shared, 1)
    k = _unit(k.unflatten(1, (sizes.key_heads, -1))).repeat_interleave(shared, 1)
    return q * sizes.key_dim**-0.5, k, v.unflatten(1, (sizes.heads, -1))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _EPS)

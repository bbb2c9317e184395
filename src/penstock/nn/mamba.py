"""Mamba 2 where other layers have attention: `ops.mamba2` has the formulas."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.nn.conv import Convolution, on_cpu
from penstock.nn.delta import Rates
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm
from penstock.nn.parameters import Vector
from penstock.nn.spec import AttentionSpec, MambaSpec, NormSpec
from penstock.quant import Dense, WeightFormat
from penstock.step import LayerCache, Step

_NO_EPS = 2.0**100
"""A norm with this epsilon, and its root for weights, gives what it is given, to the bit: where
there is none. A family's rules give it weights of ones (`models.spec.Ones`)."""


class MambaAttention(nn.Module):
    """norm, projections → convolution, states, gate, norm; `out` is the caller's last step.

    `mixed` makes what gates, and what the convolution sees: values, keys, queries; `gates` a number
    of each head, how far a token's step goes, which no format rounds.
    """

    def __init__(
        self,
        hidden: int,
        spec: AttentionSpec,
        mamba: MambaSpec,
        norm: NormSpec,
        formats: Mapping[str, WeightFormat],
        dtype: torch.dtype,
    ) -> None:
        """norm: of the rows it reads; dtype: of activations."""
        super().__init__()
        on_cpu(formats)
        turned, heads, bias = sum(spec.qkv_columns), spec.num_heads, spec.qkv_bias
        self.spec = spec
        self.mixed = Linear(hidden, spec.out_dim + turned, bias, formats["mixed"])
        self.gates = Linear(hidden, heads, bias, Dense(dtype), out_dtype=torch.float32)
        self.conv = Convolution(turned, mamba.width, mamba.conv_bias)
        self.rates = Rates(heads)
        self.shift = Vector(heads)
        self.skip = Vector(heads)
        eps, scale = (mamba.norm_eps, 1.0) if mamba.normed else (_NO_EPS, _NO_EPS**0.5)
        self.norm = Norm(spec.out_dim, NormSpec("rms", eps), scale * mamba.out_scale)
        self.step_norm = Norm(hidden, norm) if mamba.own_steps else None
        self.out = Linear(spec.out_dim, hidden, spec.out_bias, formats["out"])

    def forward(self, x: Tensor, before: Norm | None, step: Step, cache: LayerCache) -> Tensor:
        """x [T, D] → what the heads gave [T, `out_dim`], for `out`; writes states."""
        state, inputs = cache
        return ops.mamba2(
            self.mixed(x, before, step.adapters),
            self.gates(x, self.step_norm or before, step.adapters),
            self.conv.parameter("weight"),
            self.conv.parameter("bias") if self.conv.has_bias else None,
            self.rates.parameter("weight"),
            self.shift.parameter("weight"),
            self.skip.parameter("weight"),
            self.norm.parameter("weight"),
            self.norm.spec.eps,
            step.query_start,
            step.context_len,
            step.states,
            step.kept,
            state,
            inputs,
        )

"""A gated delta rule where other layers have attention: `ops.delta` has the formulas."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.nn.conv import Convolution, on_cpu
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm
from penstock.nn.parameters import Loadable, Vector, as_float32
from penstock.nn.spec import AttentionSpec, NormSpec
from penstock.quant import Codes, Dense, WeightFormat
from penstock.step import LayerCache, Step


class Rates(Loadable):
    """How fast heads forget: a checkpoint has logarithms."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def expected(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.heads,)}

    def load(self, name: str, tensor: Tensor | Codes) -> None:
        self.own(name, as_float32(tensor).exp_())


class DeltaAttention(nn.Module):
    """norm, projections → convolution, rule, norm, gate; `out` is the caller's last step.

    `mixed` makes queries, keys, values and what gates them, one projection; `gates` two numbers of
    each head, which no format rounds.
    """

    def __init__(
        self,
        hidden: int,
        spec: AttentionSpec,
        norm: NormSpec,
        formats: Mapping[str, WeightFormat],
        dtype: torch.dtype,
    ) -> None:
        """dtype: of activations."""
        super().__init__()
        assert spec.delta is not None
        on_cpu(formats)
        columns, heads = spec.qkv_columns, spec.num_heads
        self.spec = spec
        self.mixed = Linear(hidden, sum(columns) + columns[2], False, formats["mixed"])
        self.gates = Linear(hidden, 2 * heads, False, Dense(dtype), out_dtype=torch.float32)
        self.conv = Convolution(sum(columns), spec.delta.width)
        self.rates = Rates(heads)
        self.shift = Vector(heads)
        self.norm = Norm(spec.delta.value_dim, NormSpec("rms", spec.delta.norm_eps or norm.eps))
        self.strength = spec.delta.strength
        self.out = Linear(spec.out_dim, hidden, spec.out_bias, formats["out"])

    def forward(self, x: Tensor, before: Norm | None, step: Step, cache: LayerCache) -> Tensor:
        """x [T, D] → what the heads gave [T, `out_dim`], for `out`; writes states."""
        state, inputs = cache
        return ops.delta_rule(
            self.mixed(x, before, step.adapters),
            self.gates(x, before),
            self.conv.parameter("weight"),
            self.rates.parameter("weight"),
            self.shift.parameter("weight"),
            self.norm.parameter("weight"),
            self.norm.spec.eps,
            step.query_start,
            step.context_len,
            step.states,
            step.kept,
            state,
            inputs,
            self.strength,
        )

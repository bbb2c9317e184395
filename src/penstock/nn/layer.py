"""One layer: attention and feed-forward, as a `LayerSpec` describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.nn.attention import Attention
from penstock.nn.conv import ConvAttention
from penstock.nn.delta import DeltaAttention
from penstock.nn.experts import Experts
from penstock.nn.inputs import OwnInput
from penstock.nn.linear import Linear
from penstock.nn.mamba import MambaAttention
from penstock.nn.mla import LatentAttention
from penstock.nn.mlp import Mlp, add_product
from penstock.nn.norm import Norm, Scale
from penstock.nn.parameters import Vector
from penstock.nn.rope import RotaryTable
from penstock.nn.spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from penstock.parallel import Ranks
from penstock.quant import WeightFormat
from penstock.step import LayerCache, Step

SelfAttention = Attention | LatentAttention | DeltaAttention | MambaAttention | ConvAttention

Waiting = Callable[[], None]
"""Adds to the residual stream what layers give that wait for the next one (`LayerSpec.waits`)."""


def feed_forward(
    hidden: int,
    spec: MlpSpec,
    formats: Mapping[str, WeightFormat],
    dtype: torch.dtype,
    ranks: Ranks | None = None,
    norm: NormSpec | None = None,
) -> Mlp | Experts:
    """The block that `spec` describes; formats: of its matrices; dtype: of activations; ranks: who
    shares them; norm: of those that it has beside the layer's.
    """
    up, down = formats["up"], formats["down"]
    if spec.experts is None:
        return Mlp(hidden, spec, up, down, ranks)
    shared = None
    if spec.experts.shared:
        wide = replace(spec, intermediate=spec.experts.shared, experts=None)
        shared = Mlp(hidden, wide, formats["shared_up"], formats["shared_down"], ranks)
    latent = (formats["narrow"], formats["widen"]) if spec.experts.latent else None
    return Experts(hidden, spec, spec.experts, up, down, dtype, shared, ranks, norm, latent)


def self_attention(
    hidden: int,
    spec: AttentionSpec,
    norm: NormSpec,
    formats: Mapping[str, WeightFormat],
    table: RotaryTable | None,
    dtype: torch.dtype,
    ranks: Ranks | None = None,
) -> SelfAttention:
    """The attention that `spec` describes; arguments as `feed_forward`'s."""
    if spec.conv is not None:
        return ConvAttention(hidden, spec, formats)
    if spec.delta is not None:
        return DeltaAttention(hidden, spec, norm, formats, dtype)
    if spec.mamba is not None:
        return MambaAttention(hidden, spec, spec.mamba, norm, formats, dtype)
    if spec.latent is not None:
        return LatentAttention(hidden, spec, norm, formats, table, dtype, ranks)
    return Attention(hidden, spec, norm, formats, table, ranks)


def _after(hidden: int, spec: LayerSpec, norm: NormSpec) -> Norm | Scale | None:
    """What comes between a block and the add."""
    if spec.scaled:
        return Scale(hidden)
    return Norm(hidden, norm) if spec.post_norm else None


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each added to one residual stream."""

    def __init__(
        self,
        hidden: int,
        spec: LayerSpec,
        norm: NormSpec,
        formats: Mapping[str, WeightFormat],
        table: RotaryTable | None,
        dtype: torch.dtype,
        ranks: Ranks | None = None,
        number: int = 0,
    ) -> None:
        """number: which of a decoder's layers it is, where those have inputs of their own."""
        super().__init__()
        self.parallel, self.one_norm, self.waits = spec.parallel, spec.one_norm, spec.waits
        self.attention: SelfAttention | None = None
        attends = not spec.attention.is_absent
        if attends:
            self.attention = self_attention(
                hidden, spec.attention, norm, formats, table, dtype, ranks
            )
        self.mlp: Mlp | Experts | None = None
        if spec.mlp.intermediate:
            self.mlp = feed_forward(hidden, spec.mlp, formats, dtype, ranks, norm)
        self.attention_norm = Norm(hidden, norm) if spec.pre_norm and attends else None
        apart = self.mlp is not None and spec.pre_norm and not spec.one_norm
        self.mlp_norm = Norm(hidden, norm) if apart else None
        self.attention_post_norm = _after(hidden, spec, norm) if attends else None
        self.mlp_post_norm = None if self.mlp is None else _after(hidden, spec, norm)
        self.own_input: OwnInput | None = None
        if spec.input_dim:
            self.own_input = OwnInput(hidden, spec, norm, formats, number)
        self.scalar = Vector(1) if spec.scalar else None

    def forward(
        self,
        residual: Tensor,
        step: Step,
        cache: LayerCache,
        waiting: Waiting | None = None,
        inputs: Tensor | None = None,
    ) -> Waiting | None:
        """residual [T, D] += attention, += feed-forward, in place. waiting: of the layer before;
        returns what the next one is given. inputs: of all layers (`nn.inputs`).
        """
        read, before = residual, self.attention_norm
        if self.one_norm and before is not None:  # computed once for both
            read, before = before(residual), None
        add = waiting
        if self.attention is not None:
            attended = self.attention(read, before, step, cache)
            add = partial(self._add, self.attention.out, residual, attended, step, waiting)
        if self.waits:
            return add
        if add is not None and not self.parallel:
            add()
        if self.mlp is not None:
            h = self.mlp.begin(read, self.mlp_norm, step.adapters)
            if add is not None and self.parallel:  # both read the layer's input
                add()
            self.mlp.end_(residual, h, self.mlp_post_norm, step.adapters)
        if self.own_input is not None and inputs is not None:
            self.own_input(residual, inputs, step.adapters)
        if self.scalar is not None:
            ops.scale_(residual, self.scalar.parameter("weight"))
        return None

    def _add(
        self, out: Linear, residual: Tensor, attended: Tensor, step: Step, waiting: Waiting | None
    ) -> None:
        """residual += what the layer before gives, and += out of what was attended."""
        if waiting is not None:
            waiting()
        add_product(residual, out, attended, self.attention_post_norm, step.adapters)

"""One layer: attention and feed-forward, as a `LayerSpec` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from penstock.nn.attention import Attention
from penstock.nn.conv import ConvAttention
from penstock.nn.delta import DeltaAttention
from penstock.nn.experts import Experts
from penstock.nn.mamba import MambaAttention
from penstock.nn.mla import LatentAttention
from penstock.nn.mlp import Mlp, add_product
from penstock.nn.norm import Norm, Scale
from penstock.nn.rope import RotaryTable
from penstock.nn.spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from penstock.parallel import Ranks
from penstock.quant import WeightFormat
from penstock.step import LayerCache, Step


def feed_forward(
    hidden: int,
    spec: MlpSpec,
    formats: Mapping[str, WeightFormat],
    dtype: torch.dtype,
    ranks: Ranks | None = None,
) -> Mlp | Experts:
    """The block that `spec` describes; formats: of its matrices; dtype: of activations; ranks: who
    shares them.
    """
    up, down = formats["up"], formats["down"]
    if spec.experts is None:
        return Mlp(hidden, spec, up, down, ranks)
    shared = None
    if spec.experts.shared:
        wide = replace(spec, intermediate=spec.experts.shared, experts=None)
        shared = Mlp(hidden, wide, formats["shared_up"], formats["shared_down"], ranks)
    return Experts(hidden, spec, spec.experts, up, down, dtype, shared, ranks)


def self_attention(
    hidden: int,
    spec: AttentionSpec,
    norm: NormSpec,
    formats: Mapping[str, WeightFormat],
    table: RotaryTable | None,
    dtype: torch.dtype,
    ranks: Ranks | None = None,
) -> Attention | LatentAttention | DeltaAttention | MambaAttention | ConvAttention:
    """The attention that `spec` describes; arguments as `feed_forward`'s."""
    if spec.conv is not None:
        return ConvAttention(hidden, spec, formats)
    if spec.delta is not None:
        return DeltaAttention(hidden, spec, norm, formats, dtype)
    if spec.mamba is not None:
        return MambaAttention(hidden, spec, spec.mamba, formats, dtype)
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
    ) -> None:
        super().__init__()
        self.parallel, self.one_norm = spec.parallel, spec.one_norm
        self.attention = self_attention(hidden, spec.attention, norm, formats, table, dtype, ranks)
        self.mlp: Mlp | Experts | None = None
        if spec.mlp.intermediate:
            self.mlp = feed_forward(hidden, spec.mlp, formats, dtype, ranks)
        self.attention_norm = Norm(hidden, norm) if spec.pre_norm else None
        apart = self.mlp is not None and spec.pre_norm and not spec.one_norm
        self.mlp_norm = Norm(hidden, norm) if apart else None
        self.attention_post_norm = _after(hidden, spec, norm)
        self.mlp_post_norm = None if self.mlp is None else _after(hidden, spec, norm)

    def forward(self, residual: Tensor, step: Step, cache: LayerCache) -> None:
        """residual [T, D] += attention, += feed-forward, in place."""
        read, before = residual, self.attention_norm
        if self.one_norm and before is not None:  # computed once for both
            read, before = before(residual), None
        attended = self.attention(read, before, step, cache)
        adapters, mlp = step.adapters, self.mlp
        if not self.parallel:
            add_product(residual, self.attention.out, attended, self.attention_post_norm, adapters)
        if mlp is None:
            return
        h = mlp.begin(read, self.mlp_norm, adapters)
        if self.parallel:  # both read the layer's input
            add_product(residual, self.attention.out, attended, self.attention_post_norm, adapters)
        mlp.end_(residual, h, self.mlp_post_norm, adapters)

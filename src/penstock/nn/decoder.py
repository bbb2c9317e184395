"""The decoder: every text model is this one, configured by a `DecoderSpec`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.nn.attention import Attention
from penstock.nn.linear import Embedding, Linear, TiedEmbedding
from penstock.nn.norm import Norm
from penstock.nn.rope import RotaryTable
from penstock.nn.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from penstock.quant import WeightFormat, WeightFormats
from penstock.step import KV, Step


class Mlp(nn.Module):
    """Feed-forward block; `up` holds gate and up in one matrix when gated."""

    def __init__(self, hidden: int, spec: MlpSpec, weight_format: WeightFormat) -> None:
        super().__init__()
        self.spec = spec
        width = spec.intermediate * (2 if spec.gated else 1)
        self.up = Linear(hidden, width, spec.bias, weight_format)
        self.down = Linear(spec.intermediate, hidden, spec.bias, weight_format)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        tanh = self.spec.activation == "gelu_tanh"
        if not self.spec.gated:
            h = ops.gelu(h, tanh)
        elif self.spec.activation == "silu":
            h = ops.silu_mul(h)
        else:
            h = ops.gelu_mul(h, tanh)
        projected: Tensor = self.down(h)
        return projected


class DecoderLayer(nn.Module):
    """Attention and feed-forward around one residual stream."""

    def __init__(
        self,
        hidden: int,
        spec: LayerSpec,
        norm: NormSpec,
        weight_format: WeightFormat,
        table: RotaryTable | None,
    ) -> None:
        super().__init__()
        self.parallel = spec.parallel
        self.attention = Attention(hidden, spec.attention, norm, weight_format, table)
        self.mlp = Mlp(hidden, spec.mlp, weight_format)
        self.attention_norm = Norm(hidden, norm) if spec.pre_norm else None
        self.mlp_norm = Norm(hidden, norm) if spec.pre_norm else None
        self.attention_post_norm = Norm(hidden, norm) if spec.post_norm else None
        self.mlp_post_norm = Norm(hidden, norm) if spec.post_norm else None

    def forward(
        self, residual: Tensor, update: Tensor | None, step: Step, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Adds `update` (the layer before's) to `residual` in place; returns this layer's own.

        The add waits for the next norm, so that both are one operator.
        """
        h = _add_norm(self.attention_norm, residual, update)
        a = self.attention(h, step, cache)
        if self.attention_post_norm is not None:
            a = self.attention_post_norm(a)
        if self.parallel:
            h = residual if self.mlp_norm is None else self.mlp_norm(residual)
            out: Tensor = self.mlp(h)
            return out.add_(a)
        h = _add_norm(self.mlp_norm, residual, a)
        out = self.mlp(h)
        if self.mlp_post_norm is not None:
            out = self.mlp_post_norm(out)
        return out


def _add_norm(norm: Norm | None, residual: Tensor, update: Tensor | None) -> Tensor:
    if norm is not None:
        normed: Tensor = norm(residual) if update is None else norm.add(residual, update)
        return normed
    return residual if update is None else residual.add_(update)


class Decoder(nn.Module):
    """`forward(step, kv)` → logits of the rows `step.sample_at`, [S, V] float32."""

    def __init__(
        self,
        spec: DecoderSpec,
        weight_format: WeightFormat,
        dtype: torch.dtype,
        max_len: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.dtype = dtype
        self.head = Linear(
            spec.hidden, spec.vocab_size, spec.head_bias, weight_format, out_dtype=torch.float32
        )
        self.embed: nn.Module
        scale = torch.tensor(spec.embed_scale, dtype=dtype).item()  # Gemma was trained with it so
        if spec.tied:
            self.embed = TiedEmbedding(self.head, scale)
        else:
            self.embed = Embedding(spec.vocab_size, spec.hidden, dtype, scale)
        self.positions = (
            Embedding(spec.learned_positions, spec.hidden, dtype)
            if spec.learned_positions
            else None
        )
        tables: dict[RopeSpec, RotaryTable] = {}
        self.layers = nn.ModuleList()
        for layer in spec.layers:
            rope = layer.attention.rope
            table = None
            if rope is not None:
                if rope not in tables:
                    tables[rope] = RotaryTable(rope, max_len or spec.max_position)
                table = tables[rope]
            self.layers.append(DecoderLayer(spec.hidden, layer, spec.norm, weight_format, table))
        self.norm = Norm(spec.hidden, spec.norm)

    @property
    def formats(self) -> WeightFormats:
        """How its matrices and its head are stored."""
        first: DecoderLayer = self.layers[0]  # type: ignore[assignment]
        return WeightFormats(first.attention.qkv.weight_format, self.head.weight_format)

    def hidden_states(self, step: Step, kv: KV) -> tuple[Tensor, Tensor]:
        """The residual stream and its last update, each [T, D]; their sum feeds the final norm."""
        residual: Tensor = self.embed(step.tokens)
        if self.positions is not None:
            residual = residual.add_(self.positions(step.positions))
        update: Tensor | None = None
        for layer, cache in zip(self.layers, kv, strict=True):
            update = layer(residual, update, step, cache)
        assert update is not None  # spec.layers is never empty
        return residual, update

    def forward(self, step: Step, kv: KV) -> Tensor:
        residual, update = self.hidden_states(step, kv)
        rows = step.sample_at
        h = self.norm.add(residual.index_select(0, rows), update.index_select(0, rows))
        logits: Tensor = self.head(h)
        if self.spec.final_softcap:
            ops.softcap_(logits, self.spec.final_softcap)
        return logits

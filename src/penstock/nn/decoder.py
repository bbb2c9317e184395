"""The decoder: every text model is this one, configured by a `DecoderSpec`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.nn.attention import Attention
from penstock.nn.experts import Experts
from penstock.nn.linear import Embedding, Linear, TiedEmbedding
from penstock.nn.norm import Norm
from penstock.nn.rope import RotaryTable
from penstock.nn.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from penstock.quant import Dense, WeightFormat, WeightFormats
from penstock.step import KV, LayerCache, Step

MATRICES = {"qkv": "attention.qkv", "out": "attention.out", "up": "mlp.up", "down": "mlp.down"}
"""A layer's matrices, and which of its modules hold them."""


def layer_matrices(spec: LayerSpec) -> list[str]:
    """The modules of a layer that a checkpoint fills with a matrix: of experts each one's own."""
    experts = spec.mlp.experts
    if experts is None:
        return list(MATRICES.values())
    each = [f"mlp.{part}.{e}" for part in ("up", "down") for e in range(experts.count)]
    return [MATRICES["qkv"], MATRICES["out"], *each]


def stored_in(matrix: str) -> str:
    """The module that a matrix is stored in, by its name: experts' lie together in one."""
    return re.sub(r"(\.mlp\.(?:up|down))\.\d+$", r"\1", matrix)


class Mlp(nn.Module):
    """Feed-forward block: norm, up and activation in one operator; `down` is the last step.

    `up` holds gate and up in one matrix when gated.
    """

    def __init__(self, hidden: int, spec: MlpSpec, up: WeightFormat, down: WeightFormat) -> None:
        super().__init__()
        self.spec = spec
        self.up = Linear(
            hidden,
            spec.intermediate,
            spec.bias,
            up,
            activation=spec.activation,
            gated=spec.gated,
        )
        self.down = Linear(spec.intermediate, hidden, spec.bias, down)

    def begin(self, residual: Tensor, norm: Norm | None, adapters: Tensor | None) -> Tensor:
        """All but the last product: [T, intermediate]."""
        h: Tensor = self.up(residual, norm, adapters)
        return h

    def end_(
        self, residual: Tensor, h: Tensor, post_norm: Norm | None, adapters: Tensor | None
    ) -> None:
        """residual += the last product of h, in place."""
        _add(residual, self.down, h, post_norm, adapters)


def feed_forward(
    hidden: int, spec: MlpSpec, up: WeightFormat, down: WeightFormat, dtype: torch.dtype
) -> Mlp | Experts:
    """The block that `spec` describes; dtype: of activations."""
    if spec.experts is None:
        return Mlp(hidden, spec, up, down)
    return Experts(hidden, spec, spec.experts, up, down, dtype)


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Where a decoder leaves its residual stream, for those that guess by it."""

    layers: tuple[int, ...]  # what each of them reads; their number: what the final norm reads
    store: Tensor  # [N, len(layers) · D] in the decoder's dtype: row t is token t of the last step


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
    ) -> None:
        super().__init__()
        self.parallel = spec.parallel
        self.attention = Attention(
            hidden, spec.attention, norm, formats["qkv"], formats["out"], table
        )
        self.mlp = feed_forward(hidden, spec.mlp, formats["up"], formats["down"], dtype)
        self.attention_norm = Norm(hidden, norm) if spec.pre_norm else None
        self.mlp_norm = Norm(hidden, norm) if spec.pre_norm else None
        self.attention_post_norm = Norm(hidden, norm) if spec.post_norm else None
        self.mlp_post_norm = Norm(hidden, norm) if spec.post_norm else None

    def forward(self, residual: Tensor, step: Step, cache: LayerCache) -> None:
        """residual [T, D] += attention, += feed-forward, in place."""
        attended = self.attention(residual, self.attention_norm, step, cache)
        adapters, mlp = step.adapters, self.mlp
        if not self.parallel:
            _add(residual, self.attention.out, attended, self.attention_post_norm, adapters)
        h = mlp.begin(residual, self.mlp_norm, adapters)
        if self.parallel:  # both read the layer's input
            _add(residual, self.attention.out, attended, self.attention_post_norm, adapters)
        mlp.end_(residual, h, self.mlp_post_norm, adapters)


def _add(
    residual: Tensor, linear: Linear, x: Tensor, post_norm: Norm | None, adapters: Tensor | None
) -> None:
    if post_norm is None:
        linear.add_(residual, x, adapters)
    else:
        ops.add_(residual, post_norm(linear(x, None, adapters)))


class Decoder(nn.Module):
    """`forward(step, kv)` → logits of the rows `step.sample_at`, [S, V] float32."""

    def __init__(
        self,
        spec: DecoderSpec,
        formats: WeightFormats,
        dtype: torch.dtype,
        max_len: int | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.formats = formats
        self.dtype = dtype
        self.head = Linear(
            spec.hidden,
            spec.vocab_size,
            spec.head_bias,
            formats.of("head"),
            out_dtype=torch.float32,
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
        for i, layer in enumerate(spec.layers):
            rope = layer.attention.rope
            table = None
            if rope is not None:
                if rope not in tables:
                    tables[rope] = RotaryTable(rope, max_len or spec.max_position)
                table = tables[rope]
            own = {name: formats.of(f"layers.{i}.{at}") for name, at in MATRICES.items()}
            self.layers.append(DecoderLayer(spec.hidden, layer, spec.norm, own, table, dtype))
        self.norm = Norm(spec.hidden, spec.norm)
        self.kept: KeptStates | None = None

    def hidden_states(self, step: Step, kv: KV, layers: int | None = None) -> Tensor:
        """The residual stream [T, D] that the final norm reads; after the first `layers` of them.

        kv: of the layers that compute.
        """
        residual: Tensor = self.embed(step.tokens)
        if self.positions is not None:
            ops.add_(residual, self.positions(step.positions))
        for number, (layer, cache) in enumerate(zip(self.layers[:layers], kv, strict=True)):
            self._keep(residual, number)
            layer(residual, step, cache)
        self._keep(residual, len(kv))
        return residual

    def _keep(self, residual: Tensor, number: int) -> None:
        """Keep what layer `number` reads, where somebody wants it."""
        if self.kept is not None and number in self.kept.layers:
            column = self.kept.layers.index(number) * self.spec.hidden
            ops.keep_rows(residual, self.kept.store, column)

    def forward(self, step: Step, kv: KV) -> Tensor:
        return self.logits(step, self.hidden_states(step, kv))

    def logits(self, step: Step, residual: Tensor) -> Tensor:
        """The final norm and the head of the rows `step.sample_at` of a residual stream."""
        sampled = ops.embedding(step.sample_at, residual, self.spec.hidden)  # these rows of it
        logits: Tensor = self.head(sampled, self.norm)
        if self.spec.final_softcap:
            ops.softcap_(logits, self.spec.final_softcap)
        return logits

    def last_hidden_state(self) -> LastHiddenState:
        """This decoder with the final norm's rows instead of logits; they share all weights."""
        return LastHiddenState(self)

    def first_layers(self, count: int) -> FirstLayers:
        """This decoder without the layers after the first `count`; they share all weights."""
        return FirstLayers(self, count)


class FirstLayers(nn.Module):
    """`forward(step, kv)` → logits as the whole decoder's, by an early exit; kv: of these layers.

    The keys and values that they write are those that the whole decoder writes.
    """

    def __init__(self, decoder: Decoder, count: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.count = count

    def forward(self, step: Step, kv: KV) -> Tensor:
        return self.decoder.logits(step, self.decoder.hidden_states(step, kv, self.count))


class LastHiddenState(nn.Module):
    """`forward(step, kv)` → the final norm's rows `step.sample_at`, [S, D] float32.

    What transformers calls `last_hidden_state`: the decoder with nothing for a head. One that runs
    in bfloat16 is widened by a product with the identity, which is exact (one addend isn't zero)
    and lets a native program end with it as with a head.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.widen: Linear | None = None
        hidden, dtype = decoder.spec.hidden, decoder.dtype
        if dtype is not torch.float32:
            lies = decoder.head.weight_format.storage
            self.widen = Linear(hidden, hidden, False, Dense(dtype, lies), out_dtype=torch.float32)
            where = decoder.norm.parameter("weight").device
            self.widen.load("weight", torch.eye(hidden, dtype=dtype, device=where))

    def forward(self, step: Step, kv: KV) -> Tensor:
        decoder = self.decoder
        rows = ops.embedding(step.sample_at, decoder.hidden_states(step, kv), decoder.spec.hidden)
        found: Tensor = decoder.norm(rows) if self.widen is None else self.widen(rows, decoder.norm)
        return found

"""EAGLE's heads: one decoder layer that guesses a target's next state, and by it the next token.

Row p of a head reads what the target computed at position p and the token at p + 1, which is known
by then; it gives the logits of token p + 2 and a state of its own, which the next guess reads in
place of the target's. So it runs in two ways over the same weights and cache: `by_states` reads
rows of the target's states, `by_features` rows that it has given itself.
Source: EAGLE-1: Li et al. 2024, arXiv:2401.15077; EAGLE-2 (drafts as trees, the same head): Li et
al. 2024, arXiv:2406.16858; EAGLE-3: Li et al. 2025, arXiv:2503.01840.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.errors import UnsupportedModelError
from penstock.nn.attention import Attention
from penstock.nn.decoder import Decoder
from penstock.nn.layer import DecoderLayer
from penstock.nn.linear import Embedding, Linear, TiedEmbedding
from penstock.nn.mlp import Mlp
from penstock.nn.norm import Norm
from penstock.nn.rope import RotaryTable
from penstock.nn.spec import LayerSpec, NormSpec
from penstock.quant import WeightFormat, WeightFormats
from penstock.step import KV, LayerCache, Step


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """What a head is made of."""

    fuses: bool  # EAGLE-3: embedding and feature meet in the layer's attention, not before it
    hidden: int
    layer: LayerSpec
    norm: NormSpec
    vocab_size: int  # tokens that can be read
    states: tuple[int, ...]  # layers of the target whose input is read (`nn.KeptStates`)
    target_hidden: int
    own_embedding: bool = False  # else the target's
    head_size: int | None = None  # rows of its own head; None: the target's head
    fc_bias: bool = False
    input_norm: bool = False  # of EAGLE-1: before the layer's attention
    residual_is_normed: bool = False  # of EAGLE-3: its layer adds to the normed feature

    @property
    def width(self) -> int:
        """Columns of what it reads of a token."""
        return len(self.states) * self.target_hidden


class EagleHead(nn.Module):
    """What both kinds have: an embedding, a head, and the stores that rows come and go by."""

    states: Tensor  # [N, width]: rows of the target's states, of the tokens of a step
    features: Tensor  # [N, D]: rows of its own
    given: Tensor  # [N, D]: what the last step has given, of each of its tokens

    def __init__(
        self,
        spec: EagleSpec,
        target: Decoder,
        formats: WeightFormats,
        max_len: int,
    ) -> None:
        super().__init__()
        if target.spec.logit_scale != 1.0:
            raise UnsupportedModelError(
                "EAGLE heads aren't built for a model that scales its logits "
                f"(by {target.spec.logit_scale:g}). Leave them out, or guess by method='ngram'."
            )
        self.spec = spec
        self.formats = formats
        self.dtype = target.dtype
        self.table = (
            None
            if spec.layer.attention.rope is None
            else RotaryTable(spec.layer.attention.rope, max_len)
        )
        self.embed: Embedding | None = None
        if spec.own_embedding:
            self.embed = Embedding(spec.vocab_size, spec.hidden, self.dtype)
        self.norm: Norm | None = None
        # in lists: children of the target, not of this module
        self._target_embed, self._target_head = [target_embedding(target)], [target.head]
        self.softcap = target.spec.final_softcap
        self.head: Linear | None = None
        if spec.head_size is not None:
            self.softcap = 0.0
            self.head = Linear(
                spec.hidden,
                spec.head_size,
                False,
                formats.of("head"),
                out_dtype=torch.float32,
            )
        for name in ("states", "features", "given"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    def make_room(self, rows: int) -> None:
        """Allocate the stores for steps of up to `rows` tokens; before programs are made."""
        spec, make = self.spec, partial(torch.zeros, dtype=self.dtype, device=self.states.device)
        self.states = make((rows, spec.width))
        self.features = make((rows, spec.hidden))
        self.given = make((rows, spec.hidden))

    @abstractmethod
    def of_states(self, states: Tensor) -> Tensor:
        """Rows of the target's states [T, width] as the layer takes them, [T, D]."""

    @abstractmethod
    def of_features(self, features: Tensor) -> Tensor:
        """The same of its own [T, D]; may be these themselves."""

    @abstractmethod
    def go_on(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """The layer: x [T, D] and the step's tokens → the features that it gives, [T, D]."""

    @abstractmethod
    def mixing(self, by_states: bool) -> tuple[Linear, ...]:
        """The matrices that a decoder layer doesn't have, of those that one pass reads."""

    def embedded(self, tokens: Tensor) -> Tensor:
        """Rows [T, D] of the tokens' embedding."""
        found: Tensor = (self._target_embed[0] if self.embed is None else self.embed)(tokens)
        return found

    def finish(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """The layer and the head: logits [S, V] float32; the features stay in `given`."""
        residual = self.go_on(x, step, cache)
        ops.keep_rows(residual, self.given, 0)
        sampled = ops.embedding(step.sample_at, residual, self.spec.hidden)
        head = self._target_head[0] if self.head is None else self.head
        logits: Tensor = head(sampled, self.norm)
        if self.softcap:
            ops.softcap_(logits, self.softcap)
        return logits

    def by_states(self) -> ByStates:
        """This head over rows of the target's states."""
        return ByStates(self)

    def by_features(self) -> ByFeatures:
        """This head over rows of its own features."""
        return ByFeatures(self)


class ByStates(nn.Module):
    """`forward(step, kv)` → logits; token t of the step goes with row t of the head's `states`.

    kv: the head's one layer.
    """

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, step: Step, kv: KV) -> Tensor:
        rows = ops.kept_rows(step.tokens, self.head.states)
        return self.head.finish(self.head.of_states(rows), step, kv[0])


class ByFeatures(nn.Module):
    """The same with row t of the head's `features`."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, step: Step, kv: KV) -> Tensor:
        rows = ops.kept_rows(step.tokens, self.head.features)
        return self.head.finish(self.head.of_features(rows), step, kv[0])


class FeatureHead(EagleHead):
    """EAGLE-1 and 2: fc(embedding beside feature) → a layer without a first norm → the feature.

    A feature is what the target's head reads: the target's state after its final norm. fc is two
    products that are added, so that nothing is put side by side.
    """

    def __init__(
        self, spec: EagleSpec, target: Decoder, formats: WeightFormats, max_len: int
    ) -> None:
        super().__init__(spec, target, formats, max_len)
        size, matrix = spec.hidden, formats.matrix
        self.of_embedding = Linear(size, size, spec.fc_bias, matrix)
        self.of_feature = Linear(spec.width, size, False, matrix)
        own = dict.fromkeys(("qkv", "out", "up", "down"), matrix)
        self.layer = DecoderLayer(size, spec.layer, spec.norm, own, self.table, target.dtype)
        if not spec.input_norm:
            self.layer.attention_norm = None
        self._target_norm = [target.norm]

    def of_states(self, states: Tensor) -> Tensor:
        found: Tensor = self.of_feature(states, self._target_norm[0])
        return found

    def of_features(self, features: Tensor) -> Tensor:
        found: Tensor = self.of_feature(features)
        return found

    def mixing(self, by_states: bool) -> tuple[Linear, ...]:
        return self.of_embedding, self.of_feature

    def go_on(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        self.of_embedding.add_(x, self.embedded(step.tokens))
        self.layer(x, step, cache)
        return x


class FusingHead(EagleHead):
    """EAGLE-3: the layer's attention reads the embedding beside the feature, each normed.

    The target's feature is fc of its states before several layers; the next step's is what the
    layer gives, before the norm that its own head reads it by.
    """

    def __init__(
        self, spec: EagleSpec, target: Decoder, formats: WeightFormats, max_len: int
    ) -> None:
        super().__init__(spec, target, formats, max_len)
        self.fc = Linear(spec.width, spec.hidden, spec.fc_bias, formats.matrix)
        self.layer = FusingLayer(spec, formats.matrix, self.table)
        self.norm = Norm(spec.hidden, spec.norm)

    def of_states(self, states: Tensor) -> Tensor:
        found: Tensor = self.fc(states)
        return found

    def of_features(self, features: Tensor) -> Tensor:
        return features

    def mixing(self, by_states: bool) -> tuple[Linear, ...]:
        return (*((self.fc,) if by_states else ()), self.layer.qkv_of_feature)

    def go_on(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        return self.layer.go_on(self.embedded(step.tokens), x, step, cache)


class FusingLayer(nn.Module):
    """A decoder layer over two inputs, of which one is the residual stream."""

    def __init__(self, spec: EagleSpec, matrix: WeightFormat, table: RotaryTable | None) -> None:
        super().__init__()
        size, norm = spec.hidden, spec.norm
        # its qkv reads the embedding, and has the bias where there is one
        both = {"qkv": matrix, "out": matrix}
        self.attention = Attention(size, spec.layer.attention, norm, both, table)
        heads = self.attention
        self.qkv_of_feature = Linear(size, sum(heads.spec.qkv_columns), False, matrix)
        self.mlp = Mlp(size, spec.layer.mlp, matrix, matrix)
        self.embedding_norm = Norm(size, norm)
        self.feature_norm = Norm(size, norm)
        self.mlp_norm = Norm(size, norm)
        self.residual_is_normed = spec.residual_is_normed

    def go_on(self, embedded: Tensor, feature: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """embedded, feature [T, D] → the residual stream [T, D]; `feature` is overwritten."""
        normed = self.feature_norm(feature)
        qkv = self.attention.qkv(embedded, self.embedding_norm)
        self.qkv_of_feature.add_(qkv, normed)
        attended = self.attention.attend(qkv, step, cache)
        residual = normed if self.residual_is_normed else feature
        self.attention.out.add_(residual, attended)
        self.mlp.down.add_(residual, self.mlp.up(residual, self.mlp_norm))
        return residual


def target_embedding(target: Decoder) -> nn.Module:
    """The target's table as it is stored, without the scale that some families give it."""
    if isinstance(target.embed, TiedEmbedding):
        return TiedEmbedding(target.head)
    found = Embedding(target.spec.vocab_size, target.spec.hidden, target.dtype)
    table = target.embed
    assert isinstance(table, Embedding)
    found.own("weight", table.parameter("weight"))
    return found

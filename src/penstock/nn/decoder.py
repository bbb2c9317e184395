"""The decoder: every text model is this one, configured by a `DecoderSpec`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.nn.attention import Attention
from penstock.nn.grid import GridTower
from penstock.nn.inputs import layer_inputs
from penstock.nn.layer import DecoderLayer, Waiting
from penstock.nn.linear import Embedding, Linear, TiedEmbedding
from penstock.nn.mla import LatentAttention
from penstock.nn.norm import Norm
from penstock.nn.parameters import Loadable
from penstock.nn.rope import RotaryTable
from penstock.nn.shared import check_shareable, own_layers, row_worth
from penstock.nn.spec import (
    DecoderSpec,
    ExpertsSpec,
    GridSpec,
    LayerSpec,
    RopeSpec,
    VisionSpec,
)
from penstock.nn.vision import VisionTower
from penstock.parallel import Part, Ranks, Ring, Stage
from penstock.quant import Dense, Storage, WeightFormats
from penstock.step import KV, RingStep, Step

MATRICES = {
    "qkv": "attention.qkv",
    "gate": "attention.gate",
    "mixed": "attention.mixed",
    "q": "attention.q",
    "q_down": "attention.q_down",
    "q_up": "attention.q_up",
    "kv": "attention.kv",
    "out": "attention.out",
    "up": "mlp.up",
    "down": "mlp.down",
    "shared_up": "mlp.shared.up",
    "shared_down": "mlp.shared.down",
    "narrow": "mlp.narrow",
    "widen": "mlp.widen",
    "input_gate": "own_input.gate",
    "input_out": "own_input.out",
}
"""Matrices that a layer may have, and which of its modules hold them."""
OF_HEADS = "attention.heads"
"""The module of matrices that each head has of its own, which no format rounds."""


def _of_all(experts: ExpertsSpec | None) -> list[str]:
    """Of experts, those that every token meets."""
    if experts is None:
        return []
    shared = ["shared_up", "shared_down"] if experts.shared else []
    return shared + (["narrow", "widen"] if experts.latent else [])


def matrices_of(spec: LayerSpec) -> dict[str, str]:
    """Those of `MATRICES` that a layer has."""
    names, latent, experts = ["qkv"], spec.attention.latent, spec.mlp.experts
    if latent is not None:
        names = ["q_down", "q_up", "kv"] if latent.query_rank else ["q", "kv"]
    if spec.attention.has_state:
        names = ["mixed"]
    if spec.attention.is_absent:
        return {name: MATRICES[name] for name in ("up", "down", *_of_all(experts))}
    if spec.attention.gated:
        names.append("gate")
    names += ["out", "up", "down"] if spec.mlp.intermediate else ["out"]
    names += _of_all(experts)
    names += ["input_gate", "input_out"] if spec.input_dim else []
    return {name: MATRICES[name] for name in names}


def has_states(layers: Iterable[LayerSpec]) -> bool:
    """Whether any layer has states in place of a cache."""
    return any(layer.attention.has_state for layer in layers)


def has_latents(layers: Iterable[LayerSpec]) -> bool:
    """Whether any layer attends over latents."""
    return any(layer.attention.latent is not None for layer in layers)


def layer_matrices(spec: LayerSpec) -> list[str]:
    """The modules of a layer that a checkpoint fills with a matrix: of experts each one's own."""
    experts, found = spec.mlp.experts, list(matrices_of(spec).values())
    if experts is None:
        return found
    banks = [MATRICES[part] for part in ("up", "down")]
    each = [f"{bank}.{e}" for bank in banks for e in range(experts.count)]
    return [module for module in found if module not in banks] + each


def stored_in(matrix: str) -> str:
    """The module that a matrix is stored in, by its name: experts' lie together in one."""
    return re.sub(r"(\.mlp\.(?:up|down))\.\d+$", r"\1", matrix)


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Where a decoder leaves its residual stream, for those that guess by it."""

    layers: tuple[int, ...]  # what each of them reads; their number: what the final norm reads
    store: Tensor  # [N, len(layers) · D] in the decoder's dtype: row t is token t of the last step


def tower_of(
    spec: VisionSpec | GridSpec, dtype: torch.dtype, storage: Storage
) -> VisionTower | GridTower:
    """The tower that `spec` describes."""
    if isinstance(spec, GridSpec):
        return GridTower(spec, dtype, storage)
    return VisionTower(spec, dtype, storage)


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """What tokens have in place of their embeddings, where they stand for a piece of a picture."""

    store: Tensor  # [N, D] in the decoder's dtype: row t is token t's of the next step
    wanted: Tensor  # [N] int32: not 0 where it is
    deep: tuple[Tensor, ...] = ()  # [N, D] each: what the first layers add to it, 0 elsewhere


class Decoder(nn.Module):
    """`forward(step, kv)` → logits of the rows `step.sample_at`, [S, V] float32."""

    def __init__(
        self,
        spec: DecoderSpec,
        formats: WeightFormats,
        dtype: torch.dtype,
        max_len: int | None = None,
        ranks: Ranks | Ring | None = None,
    ) -> None:
        """ranks: of processes that compute each step together, of which this is one; the first is
        given the logits. Where they are a stage of several, it has some of the layers; where they
        share sequences, all weights. Raises UnsupportedModelError for what they can't share.
        """
        super().__init__()
        self.stage: Stage | None = None
        self.ring: Ring | None = None
        if ranks is not None:
            check_shareable(spec, ranks, max_len or spec.max_position)
        if isinstance(ranks, Ring):
            self.ring, ranks = ranks, None
        elif ranks is not None:
            self.stage = ranks.stage
            ranks = ranks if ranks.size > 1 else None
        self.spec = spec
        self._row_worth = row_worth(spec)
        self.formats = formats
        self.dtype = dtype
        self.ranks = ranks
        self.head = Linear(
            spec.hidden,
            spec.vocab_size,
            spec.head_bias,
            formats.of("head"),
            out_dtype=torch.float32,
            part=None if ranks is None else Part.of(ranks.split(spec.vocab_size), reader=0),
        )
        self.embed: nn.Module
        scale = spec.embed_scale
        if spec.embed_scale_rounds:
            scale = torch.tensor(scale, dtype=dtype).item()
        if spec.tied:
            self.embed = TiedEmbedding(self.head, scale)
        else:
            share = None if ranks is None else ranks.split(spec.hidden)
            self.embed = Embedding(spec.vocab_size, spec.hidden, dtype, scale, share)
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
                    length = max_len or spec.max_position
                    tables[rope] = RotaryTable(rope, length, spec.reach or None)
                table = tables[rope]
            own = {name: formats.of(f"layers.{i}.{at}") for name, at in matrices_of(layer).items()}
            self.layers.append(
                DecoderLayer(spec.hidden, layer, spec.norm, own, table, dtype, ranks, i)
            )
        self.norm = Norm(spec.hidden, spec.norm, spec.logit_scale)
        self.inputs = layer_inputs(spec, dtype, self.head.weight_format.storage)
        self.vision = (
            None
            if spec.vision is None
            else tower_of(spec.vision, dtype, self.head.weight_format.storage)
        )
        self.kept: KeptStates | None = None
        self.placed: PlacedRows | None = None
        self.own = range(len(spec.layers))
        if self.stage is not None:
            self.own = self.stage.layers(len(spec.layers))
            self._leave_to_others(self.stage)
        if self.ring is not None:
            self._join(self.ring)

    def _join(self, ring: Ring) -> None:
        """Share sequences; what comes after the layers is the first rank's."""
        for module in self.modules():
            if isinstance(module, Attention | LatentAttention):
                module.ring = ring
        if ring.rank > 0:
            self._leave([self.norm, *([] if self.spec.tied else [self.head])])

    def _leave_to_others(self, stage: Stage) -> None:
        """Nothing is loaded for what other stages have."""
        theirs: list[nn.Module] = [
            layer for i, layer in enumerate(self.layers) if i not in self.own
        ]
        if not stage.is_first:
            theirs += [self.embed, *([] if self.positions is None else [self.positions])]
        if not stage.is_last:
            theirs.append(self.norm)
        if not stage.is_last and not (stage.is_first and self.spec.tied):
            theirs.append(self.head)
        self._leave(theirs)

    def _leave(self, theirs: Iterable[nn.Module]) -> None:
        """Load nothing for these."""
        for one in theirs:
            for module in one.modules():
                if isinstance(module, Loadable):
                    module.elsewhere = True

    @property
    def is_shared_here(self) -> bool:
        """Whether other processes of this machine have parts of it."""
        return self.ranks is not None or (self.stage is not None and not self.stage.is_away)

    @property
    def copies_here(self) -> int:
        """How many processes of this machine have all of it."""
        return 1 if self.ring is None else self.ring.size

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of those that have parts of it, or all."""
        among = self.ring or self.ranks
        first = among is None or among.rank == 0
        return first and (self.stage is None or self.stage.is_first)

    @property
    def cached_layers(self) -> tuple[LayerSpec, ...]:
        """The layers as this process's cache holds them."""
        layers = self.spec.layers if self.ranks is None else own_layers(self.spec, self.ranks)
        return layers[self.own.start : self.own.stop]

    def hidden_states(self, step: Step, kv: KV, layers: int | None = None) -> Tensor:
        """The residual stream [T, D] that the final norm reads; after the first `layers` of them.

        kv: of the layers that compute.
        """
        residual = self._first_rows(step)
        inputs = None if self.inputs is None else self.inputs(step.tokens, residual)
        own = self.layers[self.own.start : self.own.stop if layers is None else layers]
        waiting: Waiting | None = None
        for number, (layer, cache) in enumerate(zip(own, kv, strict=True)):
            self._keep(residual, number)
            reads = self.spec.layers[self.own.start + number].attention.reads
            seen = cache if reads is None else kv[reads]  # no stages then (`check_shareable`)
            waiting = layer(residual, step, seen, waiting, inputs)
            if self.placed is not None and number < len(self.placed.deep):
                ops.add_(residual, ops.kept_rows(step.tokens, self.placed.deep[number]))
        if waiting is not None:  # for a layer that isn't among these
            waiting()
        self._keep(residual, len(kv))
        return residual

    def _first_rows(self, step: Step) -> Tensor:
        """The residual stream before the first layer that is this process's."""
        if self.stage is not None and not self.stage.is_first:
            return ops.take_over(step.tokens, self.spec.hidden, self.dtype, self.stage.before)
        residual: Tensor = self.embed(step.tokens)
        if self.placed is not None:
            ops.place_rows_(residual, self.placed.store, self.placed.wanted)
        if self.positions is not None:
            ops.add_(residual, self.positions(step.positions))
        return residual

    def _keep(self, residual: Tensor, number: int) -> None:
        """Keep what layer `number` reads, where somebody wants it."""
        if self.kept is not None and number in self.kept.layers:
            column = self.kept.layers.index(number) * self.spec.hidden
            ops.keep_rows(residual, self.kept.store, column)

    def forward(self, step: Step, kv: KV) -> Tensor:
        return self.logits(step, self.hidden_states(step, kv))

    def logits(self, step: Step, residual: Tensor) -> Tensor:
        """The final norm and the head of the rows `step.sample_at` of a residual stream; of a stage
        that isn't the last, [S, 0]: the stream goes on to the next. So it is of ranks of a ring
        that aren't the first.
        """
        if self.stage is not None and not self.stage.is_last:
            return ops.hand_on(residual, step.sample_at, self.stage.after)
        sampled = self.sampled_rows(step, residual)
        if not self.ends_here:
            return sampled
        logits: Tensor = self.head(sampled, self.norm)
        if self.spec.final_softcap:
            ops.softcap_(logits, self.spec.final_softcap)
        return logits

    @property
    def ends_here(self) -> bool:
        """Whether this process has what comes after the layers."""
        last = self.stage is None or self.stage.is_last
        return last and (self.ring is None or self.ring.rank == 0)

    def sampled_rows(self, step: Step, residual: Tensor) -> Tensor:
        """The rows `step.sample_at` of a residual stream [S, D]; in a ring the first rank's."""
        if self.ring is None:
            return ops.embedding(step.sample_at, residual, self.spec.hidden)
        assert isinstance(step, RingStep)
        ring = self.ring
        return ops.gather_rows(
            residual, step.sample_at, ring.meeting, step.rows, ring.rank, ring.size
        )

    def own_part(self, step: Step) -> Step:
        """What this process does of a step that others compute with it."""
        return step if self.ring is None else self.ring.part(step, self._row_worth)

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
        self.unscaled: Norm | None = None  # the final norm, where logits are scaled by its weights
        hidden, dtype = decoder.spec.hidden, decoder.dtype
        if decoder.spec.logit_scale != 1.0 and decoder.ends_here:
            self.unscaled = decoder.norm.unscaled()
        if dtype is not torch.float32 and decoder.ends_here:
            lies = decoder.head.weight_format.storage
            self.widen = Linear(hidden, hidden, False, Dense(dtype, lies), out_dtype=torch.float32)
            where = decoder.norm.parameter("weight").device
            self.widen.load("weight", torch.eye(hidden, dtype=dtype, device=where))

    def forward(self, step: Step, kv: KV) -> Tensor:
        decoder = self.decoder
        if not decoder.ends_here:
            return decoder.logits(step, decoder.hidden_states(step, kv))
        rows = decoder.sampled_rows(step, decoder.hidden_states(step, kv))
        norm = self.unscaled or decoder.norm
        found: Tensor = norm(rows) if self.widen is None else self.widen(rows, norm)
        return found

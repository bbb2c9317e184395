"""The inputs of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LayerCache = tuple[Tensor, ...]
"""One layer's keys and values; the scales of both, where they are quantized; recent tokens, where
they are kept as they are: the last arguments of `ops.rotary_cache`, in its order."""

KV = list[LayerCache]
"""The caches of all layers, in the layout of `cache/layouts`."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows of a step that see each other both ways, as a picture's do in some models: those of a
    run see what is before it, and all of it. A run ends in the step in which it begins, or in which
    the rest of it is computed.

    Shapes: N rows, R runs, M as in `Step`.
    """

    rows: Tensor  # [N] int64, of T
    query_start: Tensor  # [R + 1] int32, among these
    context_len: Tensor  # [R] int32, tokens of the sequence up to the run's end
    block_table: Tensor  # [R, M] int32


@dataclass(frozen=True, slots=True)
class Step:
    """A ragged batch of tokens, with no notion of phase.

    Sequence b contributes the tokens `query_start[b]:query_start[b + 1]`: one when it decodes,
    n for a chunk of its prompt, k + 1 when it verifies a draft of k. One step mixes all three.

    An engine's step is good until it makes the next one: its tensors lie in arrays that are then
    overwritten. Whoever needs one longer copies it.

    Shapes: T tokens, B sequences, M blocks in the longest table, S rows to sample.
    """

    tokens: Tensor  # [T] int32, ids
    positions: Tensor  # [T] int32, counted from 0 in each sequence
    slots: Tensor  # [T] int32, where a token's key and value go: block · block_size + offset
    query_start: Tensor  # [B + 1] int32
    context_len: Tensor  # [B] int32, tokens visible to the last query, itself included
    block_table: Tensor  # [B, M] int32
    sample_at: Tensor  # [S] int32, rows of T whose logits are wanted

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.shape[0]

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.context_len.shape[0]

    @property
    def copies(self) -> Tensor | None:
        """[C, 2] int32: tokens whose key and value go into another slot too; None: no such."""
        return None

    @property
    def states(self) -> Tensor | None:
        """[B] int32: where the states lie that sequences go on from, −1 at their beginning; None:
        all of them begin with the step.
        """
        return None

    @property
    def kept(self) -> Tensor | None:
        """[N, 2] int32: tokens, by rising number, and where the states after them go; None:
        nowhere.
        """
        return None

    @property
    def adapters(self) -> Tensor | None:
        """[T] int32: the slot of each token's adapter, negative where it has none; None: no such
        tokens.
        """
        return None

    @property
    def runs(self) -> Runs | None:
        """Rows that see what is after them too; None: no such. No program takes these."""
        return None


@dataclass(frozen=True, slots=True)
class ForkedStep(Step):
    """A step some of whose sequences are ways through the tree of one draft.

    Each way reads its own blocks. A token that lies on several of them is computed on the first
    one, and its key and value are written to all.
    """

    copies: Tensor


@dataclass(frozen=True, slots=True)
class StatefulStep(Step):
    """A step of a model some of whose layers have states in place of a cache (`ops.delta`,
    `ops.short_conv`).
    """

    states: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class AdaptedStep(Step):
    """A step some of whose tokens have an adapter."""

    adapters: Tensor


@dataclass(frozen=True, slots=True)
class AdaptedStatefulStep(StatefulStep):
    """Both."""

    adapters: Tensor


@dataclass(frozen=True, slots=True)
class SeeingStep(Step):
    """A step with runs, whatever else it has."""

    runs: Runs
    copies: Tensor | None = None
    adapters: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RingStep(Step):
    """One rank's part of a step, where ranks have some rows of it and some of its keys and values.

    Its tokens and positions are its own rows; everything else is of all T rows. A slot is negative
    where another rank keeps the key and value. `ops.ring` says who keeps which.
    """

    all_positions: Tensor  # [T] int32
    rows: Tensor  # [R + 1] int32: rank r computes rows[r]:rows[r + 1]
    copies: Tensor | None = None


torch.export.register_dataclass(Step, serialized_type_name="penstock.Step")
torch.export.register_dataclass(StatefulStep, serialized_type_name="penstock.StatefulStep")

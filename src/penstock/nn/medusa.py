"""Medusa heads: each guesses another one of the tokens to come, all from one state of the target.

Of a token's last hidden state x (after the final norm), from which the target's own head makes the
logits of the next token, head k makes those of the token k + 1 places after that:
    x ← x + silu(W x + b), once for each of its blocks; logits = P x.
Source: Cai et al. 2024, arXiv:2401.10774, section 2.1.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from penstock import ops
from penstock.errors import UnsupportedModelError
from penstock.nn.linear import Linear
from penstock.nn.norm import Norm
from penstock.quant import Dense, WeightFormat, WeightFormats
from penstock.step import KV, Step


@dataclass(frozen=True, slots=True)
class MedusaSpec:
    """What some heads are made of."""

    hidden: int
    num_rows: int  # of logits, as many ids can be guessed
    num_heads: int
    num_layers: int  # blocks of each head
    bias: bool = True  # of the blocks
    projection: Literal["each", "one", "target"] = "each"  # has its own; all share; the target's


class MedusaHead(nn.Module):
    """The blocks of one head."""

    def __init__(self, spec: MedusaSpec, weight_format: WeightFormat) -> None:
        super().__init__()
        d = spec.hidden
        self.layers = nn.ModuleList(
            Linear(d, d, spec.bias, weight_format, activation="silu")
            for _ in range(spec.num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [R, D], which stays as it is."""
        for layer in self.layers:
            y: Tensor = layer(x)
            ops.add_(y, x)
            x = y
        return x


class MedusaHeads(nn.Module):
    """`forward(step, kv)` takes rows of `features` in, and leaves what comes of them in a store.

    Row t of `features` is the target's residual stream of a token, before the final norm. Where
    each head has its own projection, `logits` gets those of all, head beside head; else `states`
    gets what `shared` multiplies, for all rows and heads at once: the matrix is read once.
    The step's arrays only say how many rows there are.
    """

    def __init__(
        self,
        spec: MedusaSpec,
        norm: Norm,
        head: Linear,
        formats: WeightFormats,
        dtype: torch.dtype,
        rows: int,
        device: torch.device | None = None,
    ) -> None:
        """norm, head: the target's. rows: the most in one call. device: of the stores."""
        super().__init__()
        if norm.scale != 1.0:
            raise UnsupportedModelError(
                "Medusa heads aren't built for a model that scales its logits "
                f"(by {norm.scale:g}). Leave them out, or guess by method='ngram'."
            )
        self.spec = spec
        self.target = norm, head  # in a tuple: children of the decoder, not of this module
        count, d = spec.num_heads, spec.hidden
        self.heads = nn.ModuleList(MedusaHead(spec, formats.matrix) for _ in range(count))
        own = {"each": count, "one": 1, "target": 0}[spec.projection]
        self.projections = nn.ModuleList(
            Linear(d, spec.num_rows, False, formats.head, out_dtype=torch.float32)
            for _ in range(own)
        )
        self.features = torch.zeros((rows, d), dtype=dtype, device=device)
        self.shared: SharedProjection | None = None
        if spec.projection == "each":
            self.logits = torch.zeros((rows, count * spec.num_rows), device=device)
            return
        self.states = torch.zeros((rows, count * d), dtype=dtype, device=device)
        lies = formats.head.storage
        self.end = Linear(d, 1, False, Dense(dtype, lies), out_dtype=torch.float32)
        self.end.load("weight", torch.zeros(1, d))  # a program has to end with a float32 product
        matrix = self.projections[0] if own else head
        self.shared = SharedProjection(matrix, self.states.view(rows * count, d))

    def matrices(self) -> Iterator[tuple[Linear, int]]:
        """What is multiplied, the target's head too where it is; and how many rows for a state."""
        for linear in self.heads.modules():
            if isinstance(linear, Linear):
                yield linear, 1
        for projection in self.projections or self.target[1:]:
            assert isinstance(projection, Linear)
            yield projection, 1 if self.shared is None else self.spec.num_heads

    def forward(self, step: Step, kv: KV) -> Tensor:
        """Of no interest. kv: none, as nothing of a sequence is kept."""
        norm, _ = self.target
        rows = ops.kept_rows(step.tokens, self.features)
        x = norm(ops.embedding(step.sample_at, rows, self.spec.hidden))
        y: Tensor = x
        for number, head in enumerate(self.heads):
            y = head(x)
            if self.shared is None:
                y = self.projections[number](y)
                ops.keep_rows(y, self.logits, number * self.spec.num_rows)
            else:
                ops.keep_rows(y, self.states, number * self.spec.hidden)
        return y if self.shared is None else self.end(y)


class SharedProjection(nn.Module):
    """`forward(step, kv)` → logits of rows of a store [N, D], as many as the step has tokens."""

    def __init__(self, matrix: nn.Module, store: Tensor) -> None:
        super().__init__()
        self.matrix = (matrix,)  # whose child it is already
        self.store = store

    def forward(self, step: Step, kv: KV) -> Tensor:
        """kv: none."""
        rows = ops.kept_rows(step.tokens, self.store)
        logits: Tensor = self.matrix[0](ops.embedding(step.sample_at, rows, self.store.shape[1]))
        return logits

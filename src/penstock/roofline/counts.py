"""What is counted of a step: its size, and what its operators move and compute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from penstock.hardware import Compute
from penstock.roofline.tower import TowerCost
from penstock.step import Step

Unit = Literal["float32", "bfloat16", "int8", "int4", "float8", "vector"]
"""What an operator computes in: products of a `Compute`, or elements in float32 vectors."""


@dataclass(slots=True)
class StepSize:
    """What of a step decides its cost."""

    queries: Sequence[int]  # new tokens of each sequence, at least one
    contexts: Sequence[int]  # tokens each sees, the new ones included
    sampled: int  # rows of logits
    drafted: int = 0  # of the new tokens, those that are guesses
    prefill_tokens: int = 0  # … and those of prompts, or computed again after giving way
    adapter_bytes: int = 0  # of the adapters that any of them has, each once
    experts: int = 0  # that any of them chose, of all layers together; 0: as few as could be
    seen: TowerCost | None = None  # of the tiles of pictures that went through the tower for it
    tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = sum(self.queries)

    @classmethod
    def of(cls, step: Step) -> StepSize:
        """The size of `step`, which doesn't know what of it are prompts or guesses."""
        starts = step.query_start.tolist()
        return cls(
            [b - a for a, b in pairwise(starts)], step.context_len.tolist(), len(step.sample_at)
        )

    @property
    def is_prefill(self) -> bool:
        """Whether any of a prompt was computed, or anything a second time."""
        return self.prefill_tokens > 0


@dataclass(slots=True)
class OpCost:
    """What one kind of operator moves and computes in a step."""

    op: str
    unit: Unit  # of the first product, where matrices of several formats are added up
    products: dict[Compute, int] = field(default_factory=dict)  # FLOPs, where there are any
    calls: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    activation_bytes: int = 0  # read and written, in cache
    flops: int = 0

    @property
    def bytes_moved(self) -> int:
        """From and to memory."""
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte from memory; per byte of activations where nothing else is moved."""
        return self.flops / (self.bytes_moved or self.activation_bytes or 1)

    def multiply(self, compute: Compute, flops: int) -> None:
        """Count products."""
        self.products[compute] = self.products.get(compute, 0) + flops
        self.flops += flops

    def add(self, calls: int, activation_bytes: int, flops: int = 0, weight_bytes: int = 0) -> None:
        """Count more calls."""
        self.calls += calls
        self.activation_bytes += activation_bytes
        self.flops += flops
        self.weight_bytes += weight_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """What a whole step must move and multiply."""

    weight_bytes: int
    kv_bytes: int
    products: Mapping[Compute, int]  # FLOPs

    @property
    def bytes_moved(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def flops(self) -> int:
        return sum(self.products.values())

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes_moved


def total(rows: Iterable[OpCost]) -> Cost:
    """The operators of a step added up."""
    weights = kv = 0
    products: dict[Compute, int] = {}
    for row in rows:
        weights += row.weight_bytes
        kv += row.kv_bytes
        for compute, flops in row.products.items():
            products[compute] = products.get(compute, 0) + flops
    return Cost(weights, kv, products)

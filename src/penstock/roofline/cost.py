"""Bytes and FLOPs that a step can't avoid, and the least time they take.

Counted: every weight matrix once (the rows of an untied embedding as they are used), the visible
keys and values once per sequence and layer, this step's keys and values written. Activations stay
in cache and are left out, so the floor is a lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.hardware import Peaks
from penstock.nn.spec import DecoderSpec, LayerSpec
from penstock.quant import WeightFormats


@dataclass(frozen=True, slots=True)
class Cost:
    """What one step must move and compute."""

    weight_bytes: int
    kv_bytes: int
    flops: int

    @property
    def bytes_moved(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes_moved


def matrices(spec: DecoderSpec, layer: LayerSpec) -> list[tuple[int, int]]:
    """[N, K] of a layer's matrices."""
    a, m = layer.attention, layer.mlp
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    return [
        (q + 2 * kv, spec.hidden),
        (spec.hidden, q),
        (m.intermediate * (2 if m.gated else 1), spec.hidden),
        (spec.hidden, m.intermediate),
    ]


def step_cost(
    spec: DecoderSpec,
    formats: WeightFormats,
    kv_itemsize: int,
    queries: list[int],
    contexts: list[int],
    sampled: int,
) -> Cost:
    """Cost of a step of sequences with `queries` new tokens each, up to `contexts` in all."""
    tokens = sum(queries)
    weights = flops = kv = 0
    for layer in spec.layers:
        for n, k in matrices(spec, layer):
            weights += formats.matrix.nbytes(n, k)
            flops += 2 * tokens * n * k
        a = layer.attention
        for count, context in zip(queries, contexts, strict=True):
            visible = min(context, count + a.window - 1) if a.window else context
            kv += 2 * (visible + count) * a.num_kv_heads * a.head_dim * kv_itemsize
            flops += 4 * a.num_heads * a.head_dim * _pairs(count, context, a.window)
    weights += formats.head.nbytes(spec.vocab_size, spec.hidden)
    flops += 2 * sampled * spec.vocab_size * spec.hidden
    return Cost(weights, kv, flops)


def _pairs(count: int, context: int, window: int) -> int:
    """Query-key pairs that `count` last tokens of a context see."""
    first = context - count
    if not window:
        return count * first + count * (count + 1) // 2
    return sum(min(at + 1, window) for at in range(first, context))


def floor_s(cost: Cost, peaks: Peaks) -> float:
    """The least time: the longer of moving the bytes and computing the FLOPs."""
    return max(cost.bytes_moved / peaks.read_bytes_per_s, cost.flops / peaks.matrix_flops)

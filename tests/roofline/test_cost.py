"""The floor's bytes and FLOPs, against counts made another way."""

from __future__ import annotations

import pytest
import torch

from penstock.hardware import Peaks
from penstock.nn import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec
from penstock.quant import formats_of
from penstock.roofline import floor_s, step_cost

PEAKS = Peaks(1e9, 1e12, 0.0, 2, "")


def decoder(window: int = 0) -> DecoderSpec:
    """Qwen2.5-0.5B's shape: 494,032,768 parameters, of which norms and biases are few."""
    attention = AttentionSpec(14, 2, 64, 0.125, RopeSpec(1e6, 64), qkv_bias=True, window=window)
    layer = LayerSpec(attention, MlpSpec(4864))
    return DecoderSpec(151936, 896, (layer,) * 24, NormSpec(), 32768, tied=True)


def test_decode_reads_every_matrix_once_and_the_visible_cache() -> None:
    cost = step_cost(decoder(), formats_of(None, torch.bfloat16), 2, [1], [100], 1)
    small = 24 * (2 * 896 + 1152) + 896  # norms and biases
    assert cost.weight_bytes == 2 * (494_032_768 - small)
    assert cost.kv_bytes == 24 * 2 * 2 * 64 * 2 * (100 + 1)  # read 100, write 1
    assert cost.bytes_moved == cost.weight_bytes + cost.kv_bytes
    linear = 2 * (494_032_768 - small)
    assert cost.flops == linear + 24 * 4 * 14 * 64 * 100
    assert floor_s(cost, PEAKS) == cost.bytes_moved / 1e9


def test_a_batch_reads_the_weights_once() -> None:
    one = step_cost(decoder(), formats_of(None, torch.bfloat16), 2, [1], [100], 1)
    many = step_cost(decoder(), formats_of(None, torch.bfloat16), 2, [1] * 8, [100] * 8, 8)
    assert many.weight_bytes == one.weight_bytes
    assert (many.kv_bytes, many.flops) == (8 * one.kv_bytes, 8 * one.flops)


@pytest.mark.parametrize("window", [0, 5, 40])
@pytest.mark.parametrize(("queries", "context"), [(1, 1), (1, 30), (7, 30), (30, 30)])
def test_attention_counts_the_pairs_that_are_visible(
    window: int, queries: int, context: int
) -> None:
    at = torch.arange(context - queries, context)[:, None]
    seen = torch.arange(context)[None]
    mask = (seen <= at) & ((seen > at - window) if window else torch.tensor(True))
    cost = step_cost(decoder(window), formats_of(None, torch.bfloat16), 2, [queries], [context], 0)
    matrices = 24 * (896 * 1152 + 896 * 896 + 3 * 896 * 4864)
    assert cost.flops == 2 * queries * matrices + 24 * 4 * 14 * 64 * int(mask.sum())
    read = int(mask.any(0).sum())
    assert cost.kv_bytes == 24 * 2 * 2 * 64 * 2 * (read + queries)


def test_prefill_is_bound_by_compute() -> None:
    cost = step_cost(decoder(), formats_of(None, torch.bfloat16), 2, [2048], [2048], 1)
    peaks = Peaks(1e12, 1e9, 0.0, 2, "")
    assert floor_s(cost, peaks) == cost.flops / 1e9

"""Floors of requests that nobody has run, against counts made another way."""

from __future__ import annotations

import pytest

from penstock.hardware import Peaks
from penstock.nn import DecoderSpec
from penstock.roofline import StepSize, floor_of
from penstock.roofline.outlook import Load, outlook

from .shapes import costs, mixed, of_experts, of_latents, qwen

PEAKS = Peaks(1e9, 1e12, 0.0, 2, "")
KV = 24 * 2 * 2 * 64 * 2
"""Bytes of a token of Qwen2.5-0.5B's keys and values."""


def test_memory_bounds_decoding_by_weights_and_what_is_seen() -> None:
    """Answers of 3 tokens: the prompt gives the first, steps see 101 and 102 tokens."""
    model = costs(qwen())
    weights = model.cost(StepSize([1], [1], 1)).weight_bytes
    seen = outlook(model, PEAKS, Load(100, 3, 2))
    steps = [weights + 2 * KV * (context + 1) for context in (101, 102)]
    assert seen.decode_s == pytest.approx(sum(steps) / 2 / 1e9, rel=1e-12)
    assert seen.decode_bound == "memory"
    assert seen.decode_tokens_per_s == pytest.approx(2 / seen.decode_s)
    assert seen.request_s == pytest.approx(seen.prefill_s + 2 * seen.decode_s / 2)
    assert seen.output_tokens_per_s == pytest.approx(3 * seen.requests_per_s)


@pytest.mark.parametrize(
    "spec",
    [qwen(), mixed(), of_experts(), of_latents()],
    ids=["qwen", "mixed", "experts", "latents"],
)
def test_a_prompt_is_read_in_chunks(spec: DecoderSpec) -> None:
    model = costs(spec)
    sizes = [StepSize([40], [40], 0), StepSize([40], [80], 0), StepSize([20], [100], 1)]
    for size in sizes:
        size.experts = model.expected_experts(size.tokens)
    seen = outlook(model, PEAKS, Load(100, 1, chunk=40))
    assert seen.prefill_s == sum(floor_of(model.cost(size), PEAKS).seconds for size in sizes)
    sizes = [StepSize([10], [100], 1)]
    sizes[0].experts = model.expected_experts(10)
    seen = outlook(model, PEAKS, Load(100, 1, cached_len=90, chunk=40))
    assert seen.prefill_s == floor_of(model.cost(sizes[0]), PEAKS).seconds
    assert seen.request_s == seen.prefill_s  # its only token is the prompt's


def test_prices_are_of_time() -> None:
    """3.60 dollars an hour are a thousandth of one a second."""
    seen = outlook(costs(qwen()), PEAKS, Load(100, 50, 4))
    assert seen.usd_per_million_input(3.6) == pytest.approx(1e3 * seen.prefill_s / 100)
    assert seen.usd_per_million_output(3.6) == pytest.approx(1e3 * 49 / 50 * seen.decode_s / 4)
    parts = 100 * seen.usd_per_million_input(3.6) + 50 * seen.usd_per_million_output(3.6)
    assert parts == pytest.approx(1e3 * seen.request_s)

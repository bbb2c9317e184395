"""Adapters' kernels against their reference; a row's bits whatever adapters come along with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.kernels.triton import launchers
from penstock.kernels.triton.lora import SPANS, span_of
from tests.kernels.triton.conftest import DEVICE

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def adapters_of(count: int, rank: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """down, up and scaling."""
    down, up = randn(count, rank, k, seed=1) * k**-0.5, randn(count, n, rank, seed=2)
    return down.to(dtype), up.to(dtype), torch.rand(count).to(DEVICE) / rank**0.5


def choices(tokens: int, count: int, seed: int = 0) -> Tensor:
    """An adapter for each token, or none."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, count, (tokens,), generator=generator, dtype=torch.int32).to(DEVICE)


def added(y: Tensor, x: Tensor, adapters: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    y = y.clone()
    launchers()["lora_add_"](y, x, *weights[:2], adapters, weights[2])
    return y


@pytest.mark.parametrize(
    ("tokens", "count", "rank", "n", "k"),
    [(1, 1, 1, 1, 1), (1, 3, 8, 70, 40), (19, 5, 16, 100, 600), (5, 2, 72, 16, 64)],
)
def test_products(tokens: int, count: int, rank: int, n: int, k: int, dtype: torch.dtype) -> None:
    weights = adapters_of(count, rank, n, k, dtype)
    x, wide = randn(tokens, k + 8).to(dtype)[:, 8:], randn(tokens, n + 6, seed=5).to(dtype)
    adapters = choices(tokens, count)
    want, found = wide.clone(), wide.clone()
    launchers()["lora_add_"](found[:, 6:], x, *weights[:2], adapters, weights[2])
    ops.op("lora_add_").reference(want[:, 6:], x, *weights[:2], adapters, weights[2])
    torch.testing.assert_close(found, want, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert torch.equal(found[:, :6], wide[:, :6])
    assert torch.equal(found[adapters < 0], wide[adapters < 0])


def test_a_chunk_of_many_tokens() -> None:
    """Tiles of one adapter, of several and of none."""
    tokens = 290
    weights = adapters_of(6, 4, 24, 32, torch.float32)
    x, y = randn(tokens, 32), randn(tokens, 24, seed=5)
    adapters = choices(tokens, 6)
    adapters[:100], adapters[128:200] = 4, -1
    want = y.clone()
    ops.op("lora_add_").reference(want, x, *weights[:2], adapters, weights[2])
    found = added(y, x, adapters, weights)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(added(y, x, torch.full_like(adapters, -1), weights), y)


@pytest.mark.parametrize("rank", [4, 64])
def test_a_row_s_bits_are_its_own(rank: int) -> None:
    """In chunks with adapters of their own or one for all, with few others, and alone."""
    tokens, depth = 270, 640
    weights = adapters_of(5, rank, 24, depth, torch.bfloat16)
    x, y = randn(tokens, depth).bfloat16(), randn(tokens, 24, seed=5)
    adapters = choices(tokens, 5)
    whole = added(y, x, adapters, weights)
    for some in (slice(7, 8), slice(64, 67), slice(30, 70)):
        assert torch.equal(added(y[some], x[some], adapters[some], weights), whole[some])
    same = added(y, x, torch.full_like(adapters, 2), weights)
    mine = adapters == 2
    assert mine.sum() > 20
    assert torch.equal(same[mine], whole[mine])


def test_others_values_stay_out() -> None:
    """A row that isn't finite leaves its tile's others as they are."""
    weights = adapters_of(2, 4, 16, 32, torch.float32)
    x, y = randn(4, 32), randn(4, 16, seed=5)
    adapters = torch.tensor([0, 1, 0, -1], dtype=torch.int32, device=DEVICE)
    whole = added(y, x, adapters, weights)
    x[[0, 3]] = torch.nan
    spoilt = added(y, x, adapters, weights)
    assert spoilt[0].isnan().all()
    assert torch.equal(spoilt[1:], whole[1:])


def test_spans_are_k_s_own() -> None:
    for depth in (1, 64, 512, 4096, 5000, 14336, 28672):
        assert -(-depth // span_of(depth)) <= SPANS
        assert span_of(depth) >= 512


def test_what_is_refused() -> None:
    weights = adapters_of(2, 4, 16, 32, torch.float32)
    launch, adapters = launchers()["lora_add_"], choices(4, 2)
    launch(randn(0, 16), randn(0, 32), *weights[:2], adapters[:0], weights[2])
    with pytest.raises(RuntimeError, match="rows of all are contiguous"):
        launch(randn(16, 4).t(), randn(4, 32), *weights[:2], adapters, weights[2])
    with pytest.raises(RuntimeError, match="x has K = 31"):
        launch(randn(4, 16), randn(4, 31), *weights[:2], adapters, weights[2])

"""Attention to a sequence's first tokens beside a window (StreamingLLM), as operators."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLayout
from penstock.kernels import native
from penstock.step import LayerCache

SIZE = 32
needs_native = pytest.mark.skipif(native.handle is None, reason=f"no kernels: {native.reason}")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def filled(
    length: int, kv_heads: int, dim: int, stored: torch.dtype, dtype: torch.dtype
) -> tuple[LayerCache, Tensor, Tensor, Tensor]:
    """A cache with one sequence in it, behind a block of zeros; its keys, values and blocks."""
    blocks = -(-length // SIZE)
    (cache,) = PagedLayout(((kv_heads, dim),), stored, SIZE).allocate(blocks + 1)
    k, v = (randn(length, kv_heads, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)) + 1
    at = torch.arange(length)
    slots = (order[at // SIZE] * SIZE + at % SIZE).int()
    q = torch.zeros(length, kv_heads, dim, dtype=dtype)
    qkv = torch.cat((q, k, v), dim=1).flatten(1)
    ops.rotary_cache(qkv, kv_heads, None, None, 1e-6, None, False, at.int(), slots, *cache)
    return cache, k, v, order.int().unsqueeze(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("how", ["call", "reference"])
@pytest.mark.usefixtures("isa")
def test_queries_are_turned_twice(dtype: torch.dtype, interleaved: bool, how: str) -> None:
    """Once as ever, and once as at a position that is never beyond the reach."""
    heads, kv_heads, dim, tokens, reach = 4, 2, 80, 9, 24
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms, table = (randn(dim, seed=5), randn(dim, seed=6)), randn(50, 32, seed=7)
    positions, slots = torch.arange(19, 19 + tokens).int(), torch.arange(tokens).int()
    op = getattr(ops.op("rotary_cache"), how)

    def run(at: Tensor, sink_reach: int) -> tuple[Tensor, ...]:
        (cache,) = PagedLayout(((kv_heads, dim),), dtype, SIZE).allocate(1)
        q = op(
            qkv, heads, *norms, 1e-6, table, interleaved, at, slots, *cache, sink_reach=sink_reach
        )
        return q, *cache

    both, *written = run(positions, reach)
    plain, *as_ever = run(positions, 0)
    nearer, *_ = run(positions.clamp(max=reach - 1), 0)
    assert torch.equal(both, torch.cat((plain, nearer), dim=1))
    assert all(torch.equal(a, b) for a, b in zip(written, as_ever, strict=True))
    assert not torch.equal(plain[-1], nearer[-1])


CASES = [
    (64, 14, 2, 4, 300, 0.0, False),
    (8, 8, 4, 1, 40, 20.0, True),
    (128, 40, 1, 100, 257, 0.0, False),
    (80, 4, 4, 256, 64, 0.0, True),
]
"""dim, heads, kv_heads, sink_tokens, window, softcap, whether sinks are learned too."""


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["call", "reference"])
@pytest.mark.usefixtures("isa")
def test_closed_form(case: tuple[int, int, int, int, int, float, bool], how: str) -> None:
    """A softmax over those keys that the definition names, each met by the query that it names."""
    dim, heads, kv_heads, first, window, softcap, learned = case
    length = 700
    cache, k, v, table = filled(length, kv_heads, dim, torch.float32, torch.float32)
    q = randn(length, 2 * heads, dim, seed=8)
    sinks = randn(heads, seed=9) if learned else None
    op, scale = getattr(ops.op("paged_attention"), how), dim**-0.5
    got = op(
        q, *cache, ints(0, length), ints(length), table, scale, window, softcap, sinks,
        sink_tokens=first,
    ).unflatten(1, (heads, dim))  # fmt: skip
    for at in (0, first + window - 1, first + window, 333, length - 1):
        for h in (0, heads - 1):
            kv = h // (heads // kv_heads)
            scores = k[: at + 1, kv] @ q[at, h] * scale
            seen = torch.arange(at + 1)
            if at >= first + window:
                scores[:first] = k[:first, kv] @ q[at, heads + h] * scale
                seen = torch.cat((seen[:first], seen[at + 1 - window :]))
            scores = scores[seen].double()
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            extra = [] if sinks is None else [sinks[h : h + 1].double()]
            weights = torch.softmax(torch.cat((scores, *extra)), 0)[: len(seen)]
            want = (weights @ v[seen, kv].double()).float()
            torch.testing.assert_close(got[at, h], want, rtol=2e-5, atol=2e-5)


STORED = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.bfloat16, torch.int8),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
    "int4": (torch.bfloat16, torch.uint8),
}
"""dtype of activations and of the cache."""


@needs_native
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("isa")
def test_parity(stored: str, case: tuple[int, int, int, int, int, float, bool]) -> None:
    dim, heads, kv_heads, first, window, softcap, learned = case
    dtype, kept = STORED[stored]
    length, count = 700, 600
    cache, _, _, table = filled(length, kv_heads, dim, kept, dtype)
    key, value, *scales = cache
    q = randn(count, 2 * heads, dim, dtype=dtype, seed=8)
    sinks = randn(heads, seed=9) if learned else None
    beside = dict(zip(("key_scale", "value_scale"), scales, strict=False))
    rest = (ints(0, count), ints(length), table, dim**-0.5, window, softcap, sinks)
    op = ops.op("paged_attention")
    got, want = (
        call(q, key, value, *rest, sink_tokens=first, **beside) for call in (op.call, op.reference)
    )
    tolerance = 2e-5 if dtype is torch.float32 else 1.6e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@needs_native
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("case", CASES)
def test_bits(stored: str, case: tuple[int, int, int, int, int, float, bool]) -> None:
    """The same of a prompt at once, in parts and token by token, with any threads, wherever what
    nobody sees lies, and on every instruction set. Within the window they are plain attention's.
    """
    dim, heads, kv_heads, first, window, softcap, learned = case
    dtype, kept = STORED[stored]
    length = 620
    cache, _, _, table = filled(length, kv_heads, dim, kept, dtype)
    key, value, *scales = cache
    q = randn(length, 2 * heads, dim, dtype=dtype, seed=8)
    sinks = randn(heads, seed=9) if learned else None
    beside = dict(zip(("key_scale", "value_scale"), scales, strict=False))

    def run(start: int, stop: int, blocks: Tensor = table) -> Tensor:
        return ops.paged_attention(
            q[start:stop], key, value, ints(0, stop - start), ints(stop), blocks, dim**-0.5,
            window, softcap, sinks, sink_tokens=first, **beside,
        )  # fmt: skip

    before, threads, found = native.isa, torch.get_num_threads(), []
    try:
        for isa in native.available_isas():
            native.select_isa(isa)
            found.append(run(0, length))
            cuts = [0, 1, 33, 300, 301, 340, 611, length]
            parts = [run(a, b) for a, b in pairwise(cuts)]
            assert torch.equal(torch.cat(parts), found[-1])
            torch.set_num_threads(1)
            for at in (0, first, first + window - 1, first + window, 511, 512, length - 1):
                passed = table.clone()  # what is between is let go of
                low = max(at + 1 - window, 0) // SIZE
                passed[:, math.ceil(first / SIZE) : max(low, math.ceil(first / SIZE))] = 0
                assert torch.equal(run(at, at + 1, passed)[0], found[-1][at])
            torch.set_num_threads(threads)
    finally:
        native.select_isa(before)
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found[1:])
    within = first + window
    plain = ops.paged_attention(
        q[:, :heads].contiguous(), key, value, ints(0, length), ints(length), table, dim**-0.5,
        0, softcap, sinks, **beside,
    )  # fmt: skip
    assert torch.equal(plain[:within], found[0][:within])
    assert not torch.equal(plain[within:], found[0][within:])


@needs_native
def test_refusals() -> None:
    cache, _, _, table = filled(64, 2, 16, torch.float32, torch.float32)
    q = randn(1, 4, 16)
    rest = (*cache, ints(0, 1), ints(64), table, 0.25)
    with pytest.raises(RuntimeError, match="sink_tokens are 0 to 256 and beside a window"):
        ops.paged_attention(q, *rest, 0, sink_tokens=4)
    with pytest.raises(RuntimeError, match="sink_tokens are 0 to 256 and beside a window"):
        ops.paged_attention(q, *rest, 32, sink_tokens=257)
    with pytest.raises(RuntimeError, match="q has the heads of a token twice, not 3"):
        ops.paged_attention(randn(1, 3, 16), *rest, 32, sink_tokens=4)

"""Attention over latents: native kernels against the reference and against plain attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.kernels import native
from penstock.nn.rope import cos_sin_table
from penstock.nn.spec import RopeSpec
from penstock.ops.panels import pack_panels, round_up, vnni_factor

needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(5, 24, 8, 12, 20), (2, 16, 16, 16, 16), (16, 512, 64, 128, 128), (3, 40, 2, 9, 7)]
"""Heads, rank, rotated dimensions, the rest of a query, values of a head."""
BLOCK = 32


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    near = {torch.float32: 3e-5, torch.bfloat16: 2e-2}[got.dtype]
    torch.testing.assert_close(got, want, rtol=near, atol=near)


def bank(heads: int, n: int, k: int, dtype: torch.dtype, seed: int = 7) -> Tensor:
    return torch.stack(
        [pack_panels((randn(n, k, seed=seed + h) / k**0.5).to(dtype)) for h in range(heads)]
    )


def empty_cache(blocks: int, dim: int, dtype: torch.dtype, fill: float = float("nan")) -> Tensor:
    v = vnni_factor(dtype)
    return torch.full((blocks, 1, BLOCK // 16, round_up(dim, 16) // v, 16, v), fill, dtype=dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Sequences (queries, context) over blocks in no order, with a full cache."""

    def __init__(
        self, sizes: list[tuple[int, int]], heads: int, rank: int, turning: int, dtype: torch.dtype
    ) -> None:
        dim, self.rank = rank + turning, rank
        counts = [-(-context // BLOCK) for _, context in sizes]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).int()
        self.cache = empty_cache(sum(counts), dim, dtype)
        table = torch.zeros((len(sizes), max(counts)), dtype=torch.int32)
        for b, part in enumerate(order.split(counts)):
            table[b, : counts[b]] = part
            context = sizes[b][1]
            slots = (part.repeat_interleave(BLOCK) * BLOCK).view(-1)[:context]
            slots = slots + torch.arange(context, dtype=torch.int32) % BLOCK
            kv = randn(context, dim, dtype=dtype, seed=50 + b)
            ops.op("mla_cache").reference(
                kv, torch.ones(rank), 1e-6, cos_sin(turning), True,
                torch.arange(context, dtype=torch.int32), slots.int(), self.cache,
            )  # fmt: skip
        starts = [0]
        for count, _ in sizes:
            starts.append(starts[-1] + count)
        self.q = randn(starts[-1], heads, dim, dtype=dtype, seed=9)
        self.starts, self.contexts, self.table = ints(*starts), ints(*(c for _, c in sizes)), table

    def arguments(self) -> tuple[object, ...]:
        scale = self.q.shape[2] ** -0.5
        return self.q, self.cache, self.starts, self.contexts, self.table, scale, self.rank

    def alone(self, b: int, first: int, last: int) -> tuple[object, ...]:
        """Queries [first, last) of sequence b."""
        start = int(self.starts[b])
        missing = int(self.starts[b + 1]) - start - last
        return (
            self.q[start + first : start + last], self.cache, ints(0, last - first),
            self.contexts[b : b + 1] - missing, self.table[b : b + 1], self.q.shape[2] ** -0.5,
            self.rank,
        )  # fmt: skip


def cos_sin(turning: int) -> Tensor:
    return cos_sin_table(RopeSpec(10000.0, turning), 600)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.usefixtures("isa")
@needs_native
def test_products_of_heads(shape: tuple[int, ...], tokens: int, dtype: torch.dtype) -> None:
    heads, rank, _, _, values = shape
    weight = bank(heads, values, rank, dtype)
    x = randn(tokens, heads * rank + 5, dtype=dtype)[:, 5:]
    got = ops.head_linear(x, weight, values)
    close(got, ops.op("head_linear").reference(x, weight, values))
    each = torch.cat([ops.head_linear(row, weight, values) for row in x.split(1)])
    assert torch.equal(got, each)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("isa")
@needs_native
def test_queries(shape: tuple[int, ...], interleaved: bool, dtype: torch.dtype) -> None:
    heads, rank, turning, plain, _ = shape
    weight = bank(heads, rank, plain, dtype)
    q = randn(33, heads * (plain + turning), dtype=dtype)
    given = weight, cos_sin(turning), interleaved
    at = torch.arange(33, dtype=torch.int32) * 7
    got = ops.mla_query(q, *given, at, rank)
    close(got, ops.op("mla_query").reference(q, *given, at, rank))
    alone = [ops.mla_query(q[t : t + 1], *given, at[t : t + 1], rank) for t in range(33)]
    assert torch.equal(got, torch.cat(alone))
    nearer = ops.mla_query(q, *given, at.clamp(max=99), rank)
    for both in (ops.mla_query, ops.op("mla_query").reference):
        close(both(q, *given, at, rank, 100), torch.cat((got, nearer), 1))
    assert torch.equal(ops.mla_query(q, *given, at, rank, 100), torch.cat((got, nearer), 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("isa")
@needs_native
def test_what_is_written(shape: tuple[int, ...], interleaved: bool, dtype: torch.dtype) -> None:
    """To slots and copies of them, and nowhere else."""
    _, rank, turning, _, _ = shape
    norm, at = randn(rank, seed=1), ints(5, 0, 77, 599)
    kv = randn(4, rank + turning + 3, dtype=dtype)[:, 3:]
    slots, copies = ints(40, -1, 3, 95), torch.tensor([[1, 9], [3, 64]], dtype=torch.int32)
    caches = [empty_cache(3, rank + turning, dtype, fill=7.0) for _ in range(2)]
    for call, cache in zip((ops.mla_cache, ops.op("mla_cache").reference), caches, strict=True):
        call(kv, norm, 1e-6, cos_sin(turning), interleaved, at, slots, cache, copies=copies)
    close(*caches)
    assert (caches[0] == 7.0).float().mean() > 0.8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.usefixtures("isa", "restore")
@needs_native
def test_attention(shape: tuple[int, ...], threads: int, dtype: torch.dtype) -> None:
    """Against the reference; and the same bits for each query alone, with any threads."""
    torch.set_num_threads(threads)
    heads, rank, turning, _, _ = shape
    batch = Batch([(1, 1), (1, 300), (40, 40), (7, 289), (1, 513)], heads, rank, turning, dtype)
    got = ops.mla_attention(*batch.arguments())
    close(got, ops.op("mla_attention").reference(*batch.arguments()))
    torch.set_num_threads(1)
    parts = [(0, 0, 1), (1, 0, 1), (2, 0, 1), (2, 1, 17), (2, 17, 40), (3, 0, 7), (4, 0, 1)]
    alone = [ops.mla_attention(*batch.alone(*part)) for part in parts]
    assert torch.equal(got, torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "first"), [(60, 4), (200, 0), (7, 70)])
@needs_native
def test_a_window_and_the_first_tokens(window: int, first: int, dtype: torch.dtype) -> None:
    """Against the reference, and the same bits alone and on every instruction set."""
    heads = 16 * (2 if first else 1)
    batch = Batch([(1, 300), (40, 40), (130, 289), (1, 513)], heads, 128, 32, dtype)
    before, found = native.isa, []
    try:
        for isa in native.available_isas():
            native.select_isa(isa)
            found.append(ops.mla_attention(*batch.arguments(), window, first))
            parts = [(0, 0, 1), (1, 0, 17), (1, 17, 40), (2, 0, 1), (2, 1, 99), (2, 99, 130)]
            alone = [ops.mla_attention(*batch.alone(*x), window, first) for x in parts]
            last = ops.mla_attention(*batch.alone(3, 0, 1), window, first)
            assert torch.equal(found[-1], torch.cat((*alone, last)))
    finally:
        native.select_isa(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    close(found[0], ops.op("mla_attention").reference(*batch.arguments(), window, first))


@pytest.mark.parametrize("dtype", DTYPES)
@needs_native
def test_all_instruction_sets_give_the_same_bits(dtype: torch.dtype) -> None:
    before, found = native.isa, []
    try:
        for isa in native.available_isas():
            native.select_isa(isa)
            batch = Batch([(1, 300), (40, 40), (7, 289)], 16, 128, 32, dtype)
            weight = bank(16, 128, 48, dtype)
            q = randn(20, 16 * 80, dtype=dtype)
            at = torch.arange(20, dtype=torch.int32)
            found.append(
                [
                    ops.mla_attention(*batch.arguments()),
                    ops.mla_query(q, weight, cos_sin(32), True, at, 128),
                ]
            )
    finally:
        native.select_isa(before)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_attention_over_what_latents_stand_for(dtype: torch.dtype) -> None:
    """Heads' keys and values made of latents, and plain attention over them."""
    heads, rank, turning, plain, values = 4, 32, 8, 12, 20
    batch = Batch([(3, 50)], heads, rank, turning, dtype)
    up = randn(heads, plain, rank, seed=4) / rank**0.5
    down = randn(heads, values, rank, seed=5) / rank**0.5
    q = randn(3, heads, plain + turning, seed=6)
    absorbed = torch.cat((torch.einsum("thd,hdr->thr", q[..., :plain], up), q[..., plain:]), -1)
    batch.q = absorbed.to(dtype)
    got = ops.mla_attention(*batch.arguments()).float().unflatten(1, (heads, rank))
    got = torch.einsum("thr,hvr->thv", got, down)
    kept = batch.cache[batch.table[0].long(), 0].permute(0, 1, 3, 2, 4).flatten(3).flatten(0, 2)
    kept = kept[:50].float()
    latent, turned = kept[:, :rank], kept[:, rank : rank + turning]
    keys = torch.cat(
        (torch.einsum("sr,hdr->shd", latent, up), turned[:, None].expand(-1, heads, -1)), -1
    )
    scores = torch.einsum("thd,shd->hts", q, keys) * (rank + turning) ** -0.5
    hidden = torch.arange(50) > torch.arange(47, 50)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    want = torch.einsum("hts,shv->thv", weights, torch.einsum("sr,hvr->shv", latent, down))
    near = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, want, rtol=near, atol=near)


@needs_native
def test_what_doesn_t_fit_is_refused() -> None:
    batch = Batch([(2, 40)], 4, 32, 8, torch.bfloat16)
    q, cache, *rest = batch.arguments()
    with pytest.raises(RuntimeError, match=r"layout of ops\.mla for keys of 40"):
        ops.mla_attention(q, cache[:, :, :, :-1], *rest)  # type: ignore[index, arg-type]
    with pytest.raises(RuntimeError, match="the rows' dtype"):
        ops.mla_attention(q.float(), cache, *rest)  # type: ignore[attr-defined, arg-type]
    with pytest.raises(RuntimeError, match="latents of 41 of 40 values"):
        ops.mla_attention(q, cache, *rest[:-1], 41)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="aren't those of 4 heads"):
        ops.head_linear(randn(2, 30), bank(4, 8, 8, torch.float32), 8)
    with pytest.raises(RuntimeError, match="mla_query: position 600 is beyond"):
        ops.mla_query(
            randn(1, 4 * 20), bank(4, 32, 12, torch.float32), cos_sin(8), True, ints(600), 32
        )
    with pytest.raises(RuntimeError, match="leave no latent"):
        ops.mla_cache(
            randn(1, 8), torch.ones(0), 1e-6, cos_sin(8), True, ints(0), ints(0),
            empty_cache(1, 8, torch.float32),
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="head_linear: weights must be contiguous panels"):
        ops.head_linear(randn(2, 32), torch.tensor(1.0), 8)
    with pytest.raises(RuntimeError, match="mla_query: weights must be contiguous panels"):
        ops.mla_query(randn(1, 80), torch.ones(4, 4), cos_sin(8), True, ints(0), 32)
    kv, norm = randn(1, 40), torch.ones(32)
    cache = empty_cache(1, 40, torch.float32)
    with pytest.raises(RuntimeError, match="mla_cache: slot 32 is beyond the cache of 32"):
        ops.mla_cache(kv, norm, 1e-6, cos_sin(8), True, ints(0), ints(32), cache)
    copies = torch.tensor([[1, 0]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="mla_cache: a copy of token 1 of 1"):
        ops.mla_cache(kv, norm, 1e-6, cos_sin(8), True, ints(0), ints(0), cache, copies=copies)
    given = list(batch.arguments())
    given[4] = given[4] + 50
    with pytest.raises(RuntimeError, match=r"mla_attention: block 5. is outside the cache of 2"):
        ops.mla_attention(*given)

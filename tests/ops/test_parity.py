"""Every native kernel against its reference, on every instruction set this machine has."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLayout
from penstock.kernels import native
from penstock.ops.panels import pack_panels
from penstock.step import LayerCache

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

DTYPES = [torch.float32, torch.bfloat16]
QUICK_GELU = ops.ACTIVATIONS.index("quick_gelu")


def close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def both(name: str, make: Callable[[], tuple[object, ...]]) -> tuple[Tensor, Tensor]:
    op = ops.op(name)
    return op.call(*make()), op.reference(*make())


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 64, 100, 896])
@pytest.mark.usefixtures("isa")
def test_norms(dtype: torch.dtype, dim: int) -> None:
    x = randn(5, dim, dtype=dtype)
    w, b = randn(dim, seed=2), randn(dim, seed=3)
    close(*both("rms_norm", lambda: (x, w, 1e-6)))
    close(*both("layer_norm", lambda: (x, w, b, 1e-5)))
    close(*both("layer_norm", lambda: (x, w, None, 1e-5)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("isa")
def test_add(dtype: torch.dtype) -> None:
    """Of strided rows, and nothing beside them."""
    sums, x = randn(9, 300, dtype=dtype), randn(9, 107, dtype=dtype, seed=1)[:, 7:]
    want = sums.clone()
    want[:, 100:200] += x
    ops.add_(sums[:, 100:200], x)
    assert torch.equal(sums, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [7, 64, 300])
@pytest.mark.usefixtures("isa")
def test_gate_rows(dtype: torch.dtype, dim: int) -> None:
    """Of strided rows, each as it is alone, and nothing beside them."""
    wide, x = randn(9, 300, dtype=dtype), randn(9, dim + 7, dtype=dtype, seed=1)[:, 7:]
    weight = randn(dim, seed=2)
    want, alone = wide.clone(), wide.clone()
    ops.op("gate_rows_").reference(want[:, 100:207], x, weight)
    for t in range(9):
        ops.gate_rows_(alone[t : t + 1, 100:207], x[t : t + 1], weight)
    ops.gate_rows_(wide[:, 100:207], x, weight)
    close(wide, want)
    assert torch.equal(wide[:, :100], want[:, :100])
    assert torch.equal(wide[:, 207:], want[:, 207:])
    assert torch.equal(wide, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_rows_on_all_instruction_sets(dtype: torch.dtype) -> None:
    before, found = native.isa, []
    try:
        for isa in native.available_isas():
            native.select_isa(isa)
            found.append(randn(33, 1408, dtype=dtype))
            ops.gate_rows_(found[-1], randn(33, 2047, dtype=dtype, seed=1), randn(2047, seed=2))
    finally:
        native.select_isa(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_gate_rows_refuses() -> None:
    y, x = randn(2, 8), randn(2, 5)
    if not ops.has_native("gate_rows_"):
        pytest.skip("no native kernels")
    with pytest.raises(RuntimeError, match="gate_rows_: weight must be 5 contiguous float32"):
        ops.gate_rows_(y, x, torch.ones(4))
    with pytest.raises(RuntimeError, match="gate_rows_: y has 2 rows, x 1"):
        ops.gate_rows_(y, x[:1], torch.ones(5))
    with pytest.raises(RuntimeError, match="gate_rows_: y and x must have one dtype"):
        ops.gate_rows_(y, x.bfloat16(), torch.ones(5))


@pytest.mark.usefixtures("isa")
def test_softcap() -> None:
    x = randn(3, 1001) * 100
    got = x.clone()
    ops.softcap_(got, 30.0)
    torch.testing.assert_close(got, torch.tanh(x / 30) * 30, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 7.5])
@pytest.mark.usefixtures("isa")
def test_embedding(dtype: torch.dtype, scale: float) -> None:
    table = randn(100, 72, dtype=dtype)
    tokens = torch.tensor([0, 99, 5, 5, 17], dtype=torch.int32)
    want = (table[tokens.long()].float() * scale).to(dtype)
    assert torch.equal(ops.embedding(tokens, table, 72, scale), want)
    assert torch.equal(ops.embedding(tokens, pack_panels(table), 72, scale), want)


STORED = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.bfloat16, torch.int8),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
    "int4": (torch.bfloat16, torch.uint8),
}
"""dtype of activations and of the cache."""


def caches(dim: int, kv_heads: int, blocks: int, size: int, stored: torch.dtype) -> LayerCache:
    (layer,) = PagedLayout(((kv_heads, dim),), stored, size).allocate(blocks)
    return layer


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (8, 8), (80, 32), (96, 96), (64, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", ["none", "head", "full", "turned"])
@pytest.mark.usefixtures("isa")
def test_rotary_cache(stored: str, dim: int, rotary: int, interleaved: bool, norm: str) -> None:
    dtype, kept = STORED[stored]
    heads, kv_heads, tokens, size = 4, 2, 9, 32
    qkv = randn(tokens, 3 + (heads + 2 * kv_heads) * dim, dtype=dtype)[:, 3:]
    sizes = {"none": (), "full": (heads * dim, kv_heads * dim)}.get(norm, (dim, dim))
    weights = tuple(randn(size, seed=size) for size in sizes) or (None, None)
    if norm == "turned":
        weights = randn(1, dim, seed=1), randn(1, dim, seed=2)
    cos_sin = randn(50, rotary, seed=3) if rotary else None
    positions = torch.arange(20, 20 + tokens, dtype=torch.int32)
    slots = torch.tensor([3, 4, 5, 95, 31, 32, -1, 70, 0], dtype=torch.int32)
    results = []
    for call in (ops.op("rotary_cache").call, ops.op("rotary_cache").reference):
        cache = caches(dim, kv_heads, 3, size, kept)
        out = call(qkv, heads, *weights, 1e-6, cos_sin, interleaved, positions, slots, *cache)
        results.append((out, *cache))
    for got, want in zip(*results, strict=True):
        if kept is dtype:
            close(got, want)
        else:  # what bfloat16 rounds the other way can move a byte by one step
            if got.dtype is torch.uint8:
                got, want = (torch.stack((x & 15, x >> 4)) for x in (got, want))
            tolerance = 1.01 if got.dtype in (torch.int8, torch.uint8) else 0.08
            torch.testing.assert_close(got.float(), want.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("how", ["call", "reference"])
@pytest.mark.usefixtures("isa")
def test_weights_of_rotated_heads(how: str) -> None:
    """Norms of weights 1, and the others where rotation has ended."""
    heads, dim, tokens, op = 2, 80, 7, getattr(ops.op("rotary_cache"), how)
    qkv, table = randn(tokens, 4 * dim), randn(50, 32, seed=3)
    at = torch.arange(tokens, dtype=torch.int32)
    weights, ones = (randn(1, dim, seed=1), randn(1, dim, seed=2)), torch.ones(dim)
    (plain, later) = (caches(dim, 1, 1, 32, torch.float32) for _ in range(2))
    want = op(qkv, heads, ones, ones, 1e-6, table, False, at, at, *plain) * weights[0]
    got = op(qkv, heads, *weights, 1e-6, table, False, at, at, *later, sink_reach=50)
    close(got, want.repeat(1, 2, 1))
    keys, before = (cache[0][0, 0, 0, :dim, :tokens, 0].T for cache in (later, plain))
    close(keys, before * weights[1])


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "window", "softcap", "sinks", "size"),
    [
        (64, 14, 2, 0, 0.0, False, 32),
        (64, 14, 2, 40, 0.0, True, 64),
        (8, 8, 4, 0, 20.0, False, 64),
        (80, 4, 4, 300, 5.0, True, 32),
        (128, 40, 1, 0, 0.0, True, 32),
    ],
)
@pytest.mark.usefixtures("isa")
def test_paged_attention(
    stored: str,
    dim: int,
    heads: int,
    kv_heads: int,
    window: int,
    softcap: float,
    sinks: bool,
    size: int,
) -> None:
    """Chunks, whole prompts and single tokens in one batch, with garbage in the free slots."""
    dtype, kept = STORED[stored]
    lengths, counts = [1, 33, 600, 70, 257], [1, 33, 1, 19, 40]
    blocks_of = [-(-n // size) for n in lengths]
    total = sum(blocks_of)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(5)).tolist()
    table = torch.zeros(len(lengths), max(blocks_of), dtype=torch.int32)
    cache = caches(dim, kv_heads, total, size, kept)
    for part in cache:
        part.view(torch.uint8).fill_(0xFF)  # NaN
    for b, n in enumerate(lengths):
        mine = [order.pop() for _ in range(blocks_of[b])]
        table[b, : len(mine)] = torch.tensor(mine)
        slots = torch.tensor([mine[i // size] * size + i % size for i in range(n)])
        k, v = randn(n, kv_heads, dim, dtype=dtype, seed=b), randn(n, kv_heads, dim, seed=9 + b)
        qkv = torch.cat((k, k, v.to(dtype)), dim=1).flatten(1)
        ops.op("rotary_cache").reference(
            qkv, kv_heads, None, None, 0.0, None, False, slots.int(), slots.int(), *cache
        )
    q = randn(sum(counts), heads, dim, dtype=dtype, seed=77)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    sink = randn(heads, seed=78) if sinks else None
    got, want = both(
        "paged_attention",
        lambda: (
            q, *cache[:2], starts, torch.tensor(lengths, dtype=torch.int32), table,
            dim**-0.5, window, softcap, sink, *cache[2:],
        ),
    )  # fmt: skip
    assert not got.isnan().any()
    close(got, want)


@pytest.mark.parametrize("stored", [name for name in STORED if "int4" not in name])
@pytest.mark.parametrize(("dim", "heads", "size"), [(72, 4, 32), (64, 3, 64), (16, 2, 32)])
@pytest.mark.parametrize("window", [0, 4, 270])
@pytest.mark.usefixtures("isa")
def test_attention_in_which_all_see_all(
    stored: str, dim: int, heads: int, size: int, window: int
) -> None:
    """Tiles of a picture side by side; a tile has the bits that it has alone. window: what is
    before the last of those isn't seen.
    """
    dtype, kept = STORED[stored]
    counts = [300, 1, 33]
    blocks = [-(-n // size) for n in counts]
    cache = caches(dim, heads, sum(blocks), size, kept)
    for part in cache:
        part.view(torch.uint8).fill_(0xFF)  # NaN
    table = torch.zeros(len(counts), max(blocks), dtype=torch.int32)
    used = iter(reversed(range(sum(blocks))))
    for b, n in enumerate(counts):
        mine = [next(used) for _ in range(blocks[b])]
        table[b, : len(mine)] = torch.tensor(mine)
        slots = torch.tensor([mine[i // size] * size + i % size for i in range(n)]).int()
        qkv = randn(n, 3 * heads * dim, dtype=dtype, seed=b)
        ops.op("rotary_cache").reference(
            qkv, heads, None, None, 0.0, None, False, slots, slots, *cache
        )
    q, ends = randn(sum(counts), heads, dim, dtype=dtype, seed=7), torch.tensor(counts)
    starts = torch.cat((torch.zeros(1), ends.cumsum(0))).int()
    beside = dict(zip(("key_scale", "value_scale"), cache[2:], strict=False))

    def run(call: Any, b: slice) -> Tensor:
        rows = q[int(starts[b][0]) : int(starts[b.stop])].contiguous()
        begins = starts[b.start : b.stop + 1] - starts[b.start]
        length, places = ends[b].int(), table[b].contiguous()
        found: Tensor = call(
            rows, *cache[:2], begins, length, places, dim**-0.5, window, **beside, causal=False
        )
        return found

    op = ops.op("paged_attention")
    together = run(op.call, slice(0, 3))
    close(together, run(op.reference, slice(0, 3)))
    for b in range(3):
        alone = run(op.call, slice(b, b + 1))
        assert torch.equal(alone, together[int(starts[b]) : int(starts[b + 1])])
    sinks = {"window": 4, "sink_tokens": 2, "causal": False}
    with pytest.raises(RuntimeError, match="isn't causal has no sink_tokens"):
        op.call(q.repeat(1, 2, 1), *cache[:2], starts, ends.int(), table, 1.0, **beside, **sinks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_pictures_need_on_all_instruction_sets(dtype: torch.dtype) -> None:
    before, found = native.isa, []
    qkv = randn(300, 3 * 144, dtype=dtype)
    at = torch.arange(300, dtype=torch.int32)
    table, weight = torch.arange(10, dtype=torch.int32)[None], pack_panels(qkv[:96].contiguous())
    ends = torch.tensor([0, 300], dtype=torch.int32)
    try:
        for isa in native.available_isas():
            native.select_isa(isa)
            cache = caches(72, 2, 10, 32, dtype)
            q = ops.rotary_cache(qkv, 2, None, None, 0.0, None, False, at, at, *cache)
            seen = ops.paged_attention(q, *cache, ends, ends[1:], table, 0.1, causal=False)
            bent = ops.linear(qkv, weight, None, None, None, 96, activation=QUICK_GELU)
            found.append((seen, bent))
    finally:
        native.select_isa(before)
    for seen, bent in found:
        assert torch.equal(seen, found[0][0]) and torch.equal(bent, found[0][1])


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.usefixtures("isa")
def test_scores_that_are_no_numbers_show_nothing_of_others(stored: str, sinks: bool) -> None:
    """NaN comes out, or with scores of -inf what softmax gives, not what others left behind."""
    dtype, kept = STORED[stored]
    dim, size = 64, 32
    lengths = [1, 8, 16, 20, 33, 256, 300]
    for query, keys in ((math.nan, 1.0), (math.inf, 0.0), (-math.inf, 1.0), (math.inf, 1.0)):
        for length in lengths:
            blocks = -(-length // size)
            cache = caches(dim, 1, blocks, size, kept)
            k = torch.full((length, 1, dim), keys, dtype=dtype)
            slots = torch.arange(length, dtype=torch.int32)
            qkv = torch.cat((k, k, torch.full_like(k, 3.0)), dim=1).flatten(1)
            rotary = (qkv, 1, None, None, 0.0, None, False, slots, slots, *cache)
            ops.op("rotary_cache").reference(*rotary)
            one = torch.tensor([length], dtype=torch.int32)
            starts = torch.tensor([0, 1], dtype=torch.int32)
            table = torch.arange(blocks, dtype=torch.int32)[None]
            sink = torch.zeros(1) if sinks else None
            rest = (*cache[:2], starts, one, table, 0.125, 0, 0.0, sink, *cache[2:])
            ops.paged_attention(torch.ones(1, 1, dim, dtype=dtype), *rest)  # leaves its own behind
            bad = torch.full((1, 1, dim), query, dtype=dtype)
            bad[..., 1:] = 0.0 if query == -math.inf else bad[..., 1:]
            got = ops.paged_attention(bad, *rest)
            want = ops.op("paged_attention").reference(bad, *rest)
            assert torch.equal(got.isnan(), want.isnan()), (query, keys, length)
            torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.usefixtures("isa")
def test_every_fp8_value() -> None:
    """All 256 bytes read as torch reads them; every bfloat16 is written as torch writes it."""
    cache = caches(16, 1, 1, 32, torch.float8_e4m3fn)
    slots = torch.arange(32, dtype=torch.int32)
    whole = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    numbers = whole[whole.isfinite()]
    padded = torch.nn.functional.pad(numbers, (0, -len(numbers) % 512)).view(-1, 32, 1, 16)
    for k in padded:
        qkv = k.repeat(1, 3, 1).flatten(1)
        ops.rotary_cache(qkv, 1, None, None, 0.0, None, False, slots, slots, *cache)
        kept = cache[0].view(2, 8, 16, 2).permute(0, 2, 1, 3).reshape(32, 16)
        want = k[:, 0].clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(kept.view(torch.uint8) & 0x7F, want.view(torch.uint8) & 0x7F)
        assert torch.equal(kept.float(), want.float())


def test_bad_arguments_are_refused() -> None:
    mixed = caches(16, 1, 1, 32, torch.int8)
    q, one = torch.zeros(1, 1, 16), torch.ones(1, dtype=torch.int32)
    args = (q, *mixed[:2], one.new_tensor([0, 1]), one, one.view(1, 1), 1.0)
    with pytest.raises(RuntimeError, match="goes with bfloat16"):
        ops.paged_attention(*args)
    with pytest.raises(RuntimeError, match="has scales"):
        ops.paged_attention(q.bfloat16(), *args[1:])
    x, w = randn(2, 64), randn(32, 64)
    with pytest.raises(RuntimeError, match="packed panels"):
        ops.embedding(torch.tensor([1], dtype=torch.int32), torch.zeros(2, 16, 1, 2), 16)
    with pytest.raises(RuntimeError, match="outside the table of 32"):
        ops.embedding(torch.tensor([32], dtype=torch.int32), w, 64)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        ops.rms_norm(x.double(), w[0], 1e-6)
    with pytest.raises(RuntimeError, match="no candidates"):
        ops.draw_from(
            torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0), torch.rand(3).double()
        )


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (1, 1), (50, 100), (130, 257)])
@pytest.mark.usefixtures("isa")
def test_pack(stored: torch.dtype, dtype: torch.dtype, n: int, k: int) -> None:
    """Bit for bit, rows strided; values that are not finite or denormal too."""
    weight = randn(n, k + 3, seed=n).to(stored)[:, 1 : k + 1]
    weight[0, 0] = torch.inf
    weight[-1, -1] = torch.finfo(stored).tiny / 8
    got, want = both("pack", lambda: (weight, dtype))
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    if n % 2 == 0:
        got, want = both("pack", lambda: (weight, dtype, True))
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    weight[0, 0] = torch.nan
    got, want = both("pack", lambda: (weight, dtype))
    assert got.isnan().sum() == want.isnan().sum() == 1


def test_what_cannot_be_packed() -> None:
    with pytest.raises(RuntimeError, match="has two halves, this one 5 rows"):
        ops.pack(randn(5, 8), torch.float32, True)
    with pytest.raises(RuntimeError, match="dtype must be float32 or bfloat16"):
        ops.pack(randn(4, 8), torch.float16)

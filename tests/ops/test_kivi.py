"""KIVI's cache, operator by operator: bytes, what each query sees, and what it is for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLayout
from penstock.kernels import native
from penstock.step import LayerCache

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

IMPLEMENTATIONS = ("call", "reference")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def cache(
    dim: int, kv_heads: int, blocks: int, size: int, window: int, places: int | None = None
) -> LayerCache:
    """With NaN, or what reads as one, everywhere; no block has a place yet."""
    layout = PagedLayout(((kv_heads, dim),), torch.uint8, size, window, places or blocks)
    (layer,) = layout.allocate(blocks)
    for part in layer[:6]:
        part.view(torch.uint8).fill_(0xFF)
    return layer


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def write(layer: LayerCache, k: Tensor, v: Tensor, slots: Tensor, how: str = "call") -> None:
    """k, v [T, Hkv, D] into `slots`."""
    qkv = torch.cat((k, k, v), dim=1).flatten(1)
    op = getattr(ops.op("rotary_cache"), how)
    op(qkv, k.shape[1], None, None, 0.0, None, False, slots, slots, *layer)


def read(
    layer: LayerCache,
    q: Tensor,
    length: int,
    table: list[int],
    *,
    how: str = "call",
    **more: object,
) -> Tensor:
    """The last len(q) queries of one sequence; [T, H, D]."""
    op = getattr(ops.op("paged_attention"), how)
    arguments = {"scale": q.shape[2] ** -0.5, "window": 0, "softcap": 0.0, "sinks": None} | more
    out = op(
        q, *layer[:2], ints([0, len(q)]), ints([length]), ints(table)[None],
        *arguments.values(), *layer[2:],
    )  # fmt: skip
    return out.view(q.shape)


@pytest.mark.parametrize("dim", [8, 20, 64, 80])
@pytest.mark.parametrize("size", [32, 96])
@pytest.mark.usefixtures("isa")
def test_the_bytes_are_those_of_the_reference(dim: int, size: int) -> None:
    """Of groups that one call fills, and of one that several do."""
    x = randn(96, 4, dim, seed=dim)
    x[1] *= 3e4
    x[5] += 1000
    x[6, :, 0] = 2.0**100
    x[:, :, 3] *= 50
    k, v = x.split(2, dim=1)
    results = []
    for how in IMPLEMENTATIONS:
        layer = cache(dim, 2, 96 // size, size, 48)
        layer[6].copy_(torch.arange(96 // size).flip(0))
        for first, last in ((0, 40), (40, 41), (41, 64), (64, 95)):
            slots = torch.arange(first, last, dtype=torch.int32)
            write(layer, k[first:last], v[first:last], slots, how)
        results.append(layer)
    for got, want in zip(*results, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def rounded(x: Tensor, dim: int) -> Tensor:
    """16 steps between the least and the largest along `dim`, by the definition, in float64."""
    low = x.double().amin(dim, keepdim=True).half().double()
    step = ((x.double().amax(dim, keepdim=True) - low) / 15).half().double()
    return ((x.double() - low) / step).round().clamp(0, 15) * step + low


def defined(q: Tensor, k: Tensor, v: Tensor, window: int, group: int) -> Tensor:
    """Attention of all queries of a sequence, from the words of `ops.kivi` alone; float64."""
    length = len(k)
    whole = length // 32 * 32
    coded_k, coded_v = k.double(), v.double()
    coded_k[:whole] = rounded(k[:whole].unflatten(0, (-1, 32)), 1).flatten(0, 1)
    coded_v = torch.cat([rounded(part, -1) for part in v.split(32, dim=-1)], dim=-1)
    out = torch.zeros(q.shape, dtype=torch.float64)
    for p in range(length):
        old = max(p - window, 0) // 32 * 32
        seen_k = torch.cat((coded_k[:old], k[old : p + 1].double()))
        seen_v = torch.cat((coded_v[:old], v[old : p + 1].double()))
        for h in range(q.shape[1]):
            scores = seen_k[:, h // group] @ q[p, h].double() * q.shape[2] ** -0.5
            out[p, h] = scores.softmax(0) @ seen_v[:, h // group]
    return out


@pytest.mark.parametrize(("dim", "window", "size"), [(64, 48, 32), (80, 1, 64), (16, 128, 32)])
@pytest.mark.usefixtures("isa")
def test_what_each_query_sees(dim: int, window: int, size: int) -> None:
    length, heads = 300, 4
    k, v = randn(length, 2, dim), randn(length, 2, dim, seed=1)
    q = randn(length, heads, dim, seed=2)
    blocks = -(-length // size)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(3)).tolist()
    layer = cache(dim, 2, blocks, size, window)
    layer[6].copy_(torch.arange(blocks).roll(1))
    slots = ints([table[i // size] * size + i % size for i in range(length)])
    write(layer, k, v, slots)
    want = defined(q, k, v, window, heads // 2).float()
    for how in IMPLEMENTATIONS:
        got = read(layer, q, length, table, how=how)
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "local", "softcap", "sinks", "size", "window"),
    [
        (64, 14, 2, 0, 0.0, False, 32, 40),
        (64, 14, 2, 40, 0.0, True, 64, 128),
        (8, 8, 4, 0, 20.0, False, 64, 33),
        (80, 4, 4, 300, 5.0, True, 32, 64),
        (128, 40, 1, 0, 0.0, True, 32, 200),
    ],
)
@pytest.mark.usefixtures("isa")
def test_parity(
    dim: int,
    heads: int,
    kv_heads: int,
    local: int,
    softcap: float,
    sinks: bool,
    size: int,
    window: int,
) -> None:
    """Chunks and single tokens; only the blocks in a window have a place, the others' are gone."""
    sink = torch.randn(heads, generator=torch.Generator().manual_seed(9)) if sinks else None
    for length, count in ((1, 1), (33, 33), (600, 1), (600, 70), (257, 40), (96, 96)):
        blocks = -(-length // size)
        layer = cache(dim, kv_heads, blocks, size, window)
        layer[6].copy_(torch.arange(blocks))
        slots = torch.arange(length, dtype=torch.int32)
        write(layer, randn(length, kv_heads, dim), randn(length, kv_heads, dim, seed=1), slots)
        first = max(length - count - window, 0) // 32 * 32 // size
        for block in range(first):
            layer[6][block] = -1
            for part in layer[4:6]:
                part[block].view(torch.uint8).fill_(0xFF)
        q = randn(count, heads, dim, seed=7)
        more = {"window": local, "softcap": softcap, "sinks": sink}
        got, want = (
            read(layer, q, length, list(range(blocks)), how=how, **more) for how in IMPLEMENTATIONS
        )
        assert not got.isnan().any()
        torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.usefixtures("isa")
def test_channels_of_large_keys() -> None:
    """What KIVI is for: some channels of keys are large in every token. A token's own step is then
    too wide for its other channels; a channel's own isn't. At the same bytes."""
    dim, length = 64, 512
    k, v = randn(length, 1, dim), randn(length, 1, dim, seed=1)
    k[:, :, [5, 40]] = k[:, :, [5, 40]] + 40.0
    q = randn(64, 1, dim, seed=2)
    q[:, :, [5, 40]] *= 0.05  # the large channels don't decide alone
    plain = PagedLayout(((1, dim),), torch.uint8, 32)
    kivi = PagedLayout(((1, dim),), torch.uint8, 32, 1, 16)
    assert plain.bytes_per_token(0) == kivi.bytes_per_token(0) == 2 * (dim // 2 + 8)
    exact = PagedLayout(((1, dim),), torch.bfloat16, 32)
    table, slots = list(range(16)), torch.arange(length, dtype=torch.int32)
    found = {}
    for name, layout in (("exact", exact), ("plain", plain), ("kivi", kivi)):
        (layer,) = layout.allocate(16)
        if name == "kivi":
            layer[6].copy_(torch.arange(16))
        write(layer, k, v, slots)
        found[name] = read(layer, q, length, table).float()
    error = {
        name: float((found[name] - found["exact"]).norm() / found["exact"].norm())
        for name in ("plain", "kivi")
    }
    assert error["kivi"] < 0.15
    assert error["plain"] > 3 * error["kivi"]


def test_what_cannot_be_is_refused() -> None:
    layer = cache(64, 2, 4, 32, 48, places=2)
    k, slots = randn(4, 2, 64), torch.arange(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="block 0 has place -1 of 2 in the window"):
        write(layer, k, k, slots)
    layer[6][0] = 2
    with pytest.raises(RuntimeError, match="block 0 has place 2 of 2 in the window"):
        write(layer, k, k, slots)
    layer[6][0] = 1
    write(layer, k, k, slots)
    with pytest.raises(RuntimeError, match="block 1 of sequence 0 has place -1 of 2"):
        read(layer, k, 40, [0, 1])
    with pytest.raises(RuntimeError, match=r"a window has recent_keys, .* beside an int4 cache"):
        write(layer[:5], k, k, slots)
    layer[7][0] = 0
    with pytest.raises(RuntimeError, match="recent_window must be positive, not 0"):
        write(layer, k, k, slots)

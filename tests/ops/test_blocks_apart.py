"""Blocks of a cache that lie between those of other layers, or one behind the other: same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLayout
from penstock.kernels import native
from penstock.step import LayerCache
from tests.ops.test_parity import STORED, randn

pytestmark = pytest.mark.usefixtures("isa")
needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")

HEADS, KV_HEADS, DIM, BLOCKS, SIZE = 6, 2, 40, 5, 64
SLOTS = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(3))[:150].int()


def apart(stored: str) -> LayerCache:
    """The middle one of three layers that are unlike each other."""
    heads = ((1, 16), (KV_HEADS, DIM), (3, 64))
    kept = torch.uint8 if stored == "kivi" else STORED[stored][1]
    window = (32, BLOCKS) if stored == "kivi" else ()
    return PagedLayout(heads, kept, SIZE, *window).allocate(BLOCKS)[1]


def close_together(cache: LayerCache) -> LayerCache:
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in cache)


def written_and_read(stored: str, cache: LayerCache, way: str) -> list[Tensor]:
    dtype = torch.bfloat16 if stored == "kivi" else STORED[stored][0]
    write, read = (getattr(ops.op(name), way) for name in ("rotary_cache", "paged_attention"))
    slots = SLOTS
    if stored == "kivi":  # in order, and each block has a place
        slots = torch.arange(150, dtype=torch.int32)
        cache[6][:] = torch.arange(BLOCKS - 1, -1, -1)
    qkv = randn(len(slots), (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype)
    positions = torch.arange(len(slots), dtype=torch.int32)
    q = write(qkv, HEADS, None, None, 1e-6, None, False, positions, slots, *cache)
    lengths = torch.tensor([150, 70], dtype=torch.int32)
    table = torch.tensor([[0, 1, 2], [0, 1, 2]], dtype=torch.int32)
    starts = torch.tensor([0, 1, 20], dtype=torch.int32)
    rest = (starts, lengths, table, DIM**-0.5, 0, 0.0, None, *cache[2:])
    return [q, read(q[:20].contiguous(), *cache[:2], *rest), *cache]


@pytest.mark.parametrize("way", ["call", "reference"])
@pytest.mark.parametrize("stored", [*STORED, "kivi"])
def test_where_blocks_lie_changes_nothing(stored: str, way: str) -> None:
    between = apart(stored)
    for part in between[:4]:
        assert not part.is_contiguous() and part[0].is_contiguous()
        part.view(torch.uint8).fill_(0)
    behind = close_together(between)
    assert all(part.is_contiguous() for part in behind)
    got = written_and_read(stored, between, way)
    want = written_and_read(stored, behind, way)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert all(bool(part.view(torch.uint8).any()) for part in want[2:6])


@needs_native
def test_nothing_is_written_between_blocks() -> None:
    """What other layers have there stays as it is."""
    layers = PagedLayout(((1, 16), (KV_HEADS, DIM), (3, 64)), torch.int8, SIZE).allocate(BLOCKS)
    others = [part for layer in (layers[0], layers[2]) for part in layer]
    for part in others:
        part.view(torch.uint8).fill_(0xA5)
    written_and_read("int8", layers[1], "call")
    assert all(bool((part.view(torch.uint8) == 0xA5).all()) for part in others)


@needs_native
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda k, v, *s: (k.transpose(2, 3).contiguous().transpose(2, 3), v, *s), "by itself"),
        (lambda k, v, *s: (k.as_strided(k.shape, (8, *k.stride()[1:])), v, *s), "on each other"),
        (lambda k, v, *s: (k.contiguous(), v, *s), "equally far apart"),
        (lambda k, v, a, b: (k, v, a.transpose(1, 2).contiguous().transpose(1, 2), b), "by itself"),
        (lambda k, v, a, b: (k, v, a.contiguous().view(1, -1), b), "scales must be float16"),
    ],
)
def test_blocks_that_cannot_be_read(change, said: str) -> None:  # type: ignore[no-untyped-def]
    cache = change(*apart("int8"))
    with pytest.raises(RuntimeError, match=said):
        written_and_read("int8", cache, "call")

"""Keys and values of four bits: what is written and read, bit for bit, against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLayout
from penstock.kernels import native
from penstock.ops import kv_int4
from penstock.ops.attention import gather_keys, gather_values
from penstock.step import LayerCache

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

IMPLEMENTATIONS = ("call", "reference")


def cache(dim: int, heads: int = 2, blocks: int = 3, size: int = 32) -> LayerCache:
    (layer,) = PagedLayout(((heads, dim),), torch.uint8, size).allocate(blocks)
    return layer


def written(qkv: Tensor, slots: Tensor, implementation: str, dim: int, size: int) -> LayerCache:
    layer = cache(dim, size=size, blocks=96 // size)
    op = getattr(ops.op("rotary_cache"), implementation)
    op(qkv, 2, None, None, 0.0, None, False, slots, slots, *layer)
    return layer


def numbers(tokens: int, dim: int) -> Tensor:
    """q, k, v of two heads each: ordinary, large, constant, tiny, and one far from 0."""
    x = torch.randn(tokens, 6, dim, generator=torch.Generator().manual_seed(dim)).bfloat16()
    x[1] *= 3e4
    x[2] = 0.0
    x[3] = -1.5
    x[4] *= 1e-30
    x[5] += 1000
    x[6, :, 0] = 2.0**100  # beyond float16
    x[7, :, -1] = -(2.0**100)
    return x.flatten(1)


@pytest.mark.parametrize("dim", [8, 20, 32, 64, 80, 128])
@pytest.mark.parametrize("size", [32, 96])
@pytest.mark.usefixtures("isa")
def test_the_bytes_are_those_of_the_reference(dim: int, size: int) -> None:
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(1))[:40].int()
    qkv = numbers(40, dim)
    kernel, reference = (written(qkv, slots, how, dim, size) for how in IMPLEMENTATIONS)
    for got, want in zip(kernel, reference, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dim", [8, 64, 80])
@pytest.mark.usefixtures("isa")
def test_error_of_at_most_half_a_step(dim: int) -> None:
    """And of bfloat16's and float16's rounding; the group's range is all that decides."""
    slots = torch.arange(40, dtype=torch.int32)
    x = torch.randn(40, 6, dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    layer = written(x.flatten(1), slots, "call", dim, 32)
    blocks = torch.arange(3)
    for have, want in (
        (gather_keys(layer[0], blocks, 40, dim, layer[2]), x[:, 2:4].float()),
        (gather_values(layer[1], blocks, 40, dim, layer[3]), x[:, 4:].float()),
    ):
        for a, b in zip(have.split(32, -1), want.split(32, -1), strict=True):
            low, high = b.amin(-1, keepdim=True), b.amax(-1, keepdim=True)
            bound = (high - low) / 30 + 2**-8 * torch.maximum(low.abs(), high.abs())
            assert (abs(a - b) <= bound).all()


@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.usefixtures("isa")
def test_every_code_is_read_as_the_definition_says(dim: int) -> None:
    """A query that sees a single position returns its value: all 16 codes, with odd steps."""
    size = 32
    layer = cache(dim, heads=1, blocks=2, size=size)
    generator = torch.Generator().manual_seed(4)
    for part in layer[:2]:
        part.copy_(torch.randint(0, 256, part.shape, generator=generator))
    for part in layer[2:]:
        part.copy_(torch.randn(part.shape, generator=generator) * 3)
    count = 2 * size
    # of `count` sequences, each one position long, at every place of a block
    want = gather_values(layer[1], torch.arange(2), count, dim, layer[3])
    for at in range(count):
        block = torch.tensor([[at // size]], dtype=torch.int32)
        only = at % size + 1
        q = torch.zeros(1, 1, dim, dtype=torch.bfloat16)
        starts, length = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [only]))
        got = ops.paged_attention(
            q, *layer[:2], starts, length, block, 1.0, 1, 0.0, None, *layer[2:]
        )
        assert torch.equal(got.view(dim), want[at, 0].bfloat16())


def test_halves_go_away_from_zero() -> None:
    """257 + 1/2^… : a float32 halfway between two bfloat16 goes to the larger magnitude."""
    codes = torch.tensor([1, 3, 1, 3], dtype=torch.uint8)
    step = torch.tensor([1.0, 1.0, -1.0, -1.0])
    minimum = torch.tensor([256.0, 256.0, -256.0, -256.0])
    assert kv_int4.widen(codes, step, minimum).tolist() == [258.0, 260.0, -258.0, -260.0]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_seen(bad: float) -> None:
    """It poisons its own group of its own token, in both implementations."""
    x = torch.zeros(3, 6, 64, dtype=torch.bfloat16)
    x[1, 2, 40] = x[1, 4, 3] = bad
    slots = torch.arange(3, dtype=torch.int32)
    for how in IMPLEMENTATIONS:
        layer = written(x.flatten(1), slots, how, 64, 32)
        keys = gather_keys(layer[0], torch.arange(1), 3, 64, layer[2]).isnan()
        values = gather_values(layer[1], torch.arange(1), 3, 64, layer[3]).isnan()
        assert keys[1, 0, 32:].all()
        assert values[1, 0, :32].all()
        assert keys.sum() == values.sum() == 32


def test_scales_of_another_shape_are_refused() -> None:
    layer = cache(64)
    slots = torch.zeros(1, dtype=torch.int32)
    qkv = torch.zeros(1, 6 * 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"float16 \[blocks, heads, groups, 2, block size\]"):
        ops.rotary_cache(
            qkv, 2, None, None, 0.0, None, False, slots, slots, *layer[:3], layer[3][:, :, :1]
        )
    with pytest.raises(RuntimeError, match="goes with bfloat16"):
        ops.rotary_cache(qkv.float(), 2, None, None, 0.0, None, False, slots, slots, *layer)

"""Every native kernel against its reference, on every instruction set this machine has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.kernels import native
from penstock.ops.panels import pack_panels

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

DTYPES = [torch.float32, torch.bfloat16]


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


def caches(dim: int, kv_heads: int, blocks: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    v, padded = 4 // dtype.itemsize, -(-dim // 16) * 16
    return [
        torch.full((blocks, kv_heads, size // 16, padded // v, 16, v), 0.0, dtype=dtype),
        torch.full((blocks, kv_heads, padded // 16, size // v, 16, v), 0.0, dtype=dtype),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (8, 8), (80, 32), (96, 96), (64, 0)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.usefixtures("isa")
def test_rotary_cache(
    dtype: torch.dtype, dim: int, rotary: int, interleaved: bool, norm: bool
) -> None:
    heads, kv_heads, tokens, size = 4, 2, 9, 32
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q, k, v = (
        t.unflatten(1, (-1, dim))
        for t in qkv.split((heads * dim, kv_heads * dim, kv_heads * dim), 1)
    )
    weights = (randn(dim, seed=1), randn(dim, seed=2)) if norm else (None, None)
    cos_sin = randn(50, rotary, seed=3) if rotary else None
    positions = torch.arange(20, 20 + tokens, dtype=torch.int32)
    slots = torch.tensor([3, 4, 5, 95, 31, 32, -1, 70, 0], dtype=torch.int32)
    results = []
    for call in (ops.op("rotary_cache").call, ops.op("rotary_cache").reference):
        kc, vc = caches(dim, kv_heads, 3, size, dtype)
        out = call(q, k, v, *weights, 1e-6, cos_sin, interleaved, positions, slots, kc, vc)
        results.append((out, kc, vc))
    for got, want in zip(*results, strict=True):
        close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
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
    dtype: torch.dtype,
    dim: int,
    heads: int,
    kv_heads: int,
    window: int,
    softcap: float,
    sinks: bool,
    size: int,
) -> None:
    """Chunks, whole prompts and single tokens in one batch, with garbage in the free slots."""
    lengths, counts = [1, 33, 600, 70, 257], [1, 33, 1, 19, 40]
    blocks_of = [-(-n // size) for n in lengths]
    total = sum(blocks_of)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(5)).tolist()
    table = torch.zeros(len(lengths), max(blocks_of), dtype=torch.int32)
    kc, vc = caches(dim, kv_heads, total, size, dtype)
    kc.fill_(float("nan"))
    vc.fill_(float("nan"))
    for b, n in enumerate(lengths):
        mine = [order.pop() for _ in range(blocks_of[b])]
        table[b, : len(mine)] = torch.tensor(mine)
        slots = torch.tensor([mine[i // size] * size + i % size for i in range(n)])
        k, v = randn(n, kv_heads, dim, dtype=dtype, seed=b), randn(n, kv_heads, dim, seed=9 + b)
        ops.op("rotary_cache").reference(
            k, k, v.to(dtype), None, None, 0.0, None, False, slots.int(), slots.int(), kc, vc
        )
    q = randn(sum(counts), heads, dim, dtype=dtype, seed=77)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    sink = randn(heads, seed=78) if sinks else None
    got, want = both(
        "paged_attention",
        lambda: (
            q, kc, vc, starts, torch.tensor(lengths, dtype=torch.int32), table,
            dim**-0.5, window, softcap, sink,
        ),
    )  # fmt: skip
    assert not got.isnan().any()
    close(got, want)


def test_bad_arguments_are_refused() -> None:
    x, w = randn(2, 64), randn(32, 64)
    with pytest.raises(RuntimeError, match="packed panels"):
        ops.embedding(torch.tensor([1], dtype=torch.int32), torch.zeros(2, 16, 1, 2), 16)
    with pytest.raises(RuntimeError, match="outside the table of 32"):
        ops.embedding(torch.tensor([32], dtype=torch.int32), w, 64)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        ops.rms_norm(x.double(), w[0], 1e-6)

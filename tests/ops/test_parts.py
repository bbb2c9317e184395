"""What Gemma 4 asks of operators: fewer parts of a projection, normed values, factors, groups of
norms, a router that reads other rows than experts do.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock import ops
from penstock.cache import PagedLayout
from penstock.ops.attention import gather_keys, gather_values
from penstock.quant import Dense

from . import test_experts as mixtures
from .test_sink_tokens import needs_native, randn

SIZE, TOKENS, HEADS, KV_HEADS, DIM = 32, 41, 6, 2, 40
STORED = [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("bfloat16", torch.int8)]
STORED += [("bfloat16", torch.uint8)]


def written(how: str, parts: int, dtype: torch.dtype, stored: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, and keys and values as the cache has them then."""
    columns = (HEADS + (parts - 1) * KV_HEADS) * DIM
    (cache,) = PagedLayout(((KV_HEADS, DIM),), stored, SIZE).allocate(3)
    q = getattr(ops.op("rotary_cache"), how)(
        randn(TOKENS, columns, dtype=dtype), HEADS, randn(DIM, seed=2),
        None if parts == 1 else randn(DIM, seed=3), 1e-6, randn(2 * TOKENS, DIM, seed=4), False,
        torch.arange(5, 5 + TOKENS).int(), torch.arange(TOKENS).flip(0).int(), *cache,
        copies=torch.tensor([[3, 90]], dtype=torch.int32), norm_values=True, parts=parts,
    )  # fmt: skip
    key, value, *scales = cache
    blocks, (key_scale, value_scale) = torch.arange(3), scales or (None, None)
    kept = gather_keys(key, blocks, 96, DIM, key_scale)
    return q, kept, gather_values(value, blocks, 96, DIM, value_scale)


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize(("name", "stored"), STORED)
@pytest.mark.usefixtures("isa")
@needs_native
def test_parts_of_a_projection(parts: int, name: str, stored: torch.dtype) -> None:
    dtype = getattr(torch, name)
    got, want = (written(how, parts, dtype, stored) for how in ("call", "reference"))
    near = 1e-5 if dtype is torch.float32 else 0.06 if stored is not torch.uint8 else 0.6
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=near, atol=near)
    if parts == 1:
        assert not any(kept.any() for kept in got[1:])


def test_values_are_normed_and_may_be_keys() -> None:
    """In float64, by hand."""
    _, keys, values = written("reference", 2, torch.float32, torch.float32)
    rows = randn(TOKENS, (HEADS + KV_HEADS) * DIM).double().unflatten(1, (-1, DIM))
    normed = rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    at = TOKENS - 1  # the first token's slot
    torch.testing.assert_close(values[at].double(), normed[0, HEADS:], rtol=1e-5, atol=1e-6)
    apart = TOKENS - 1 - 7  # that of one which is turned
    turned = normed[7, HEADS:] * randn(DIM, seed=3)
    assert not torch.allclose(keys[apart].double(), turned, atol=1e-3)
    torch.testing.assert_close(values[apart].double(), normed[7, HEADS:], rtol=1e-5, atol=1e-6)


@needs_native
def test_parts_that_aren_t_there() -> None:
    for parts in (0, 4):
        with pytest.raises(RuntimeError, match="parts are 1 to 3"):
            written("call", parts, torch.float32, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("isa")
@needs_native
def test_factors(dtype: torch.dtype) -> None:
    x, y = randn(9, 100, dtype=dtype), randn(9, 140, seed=1, dtype=dtype)
    for name, given in (("multiply_", (x, 20)), ("scale_", (torch.tensor([0.37]),))):
        both = []
        for implementation in ops.implementations(name).values():
            wide = y.clone()
            implementation(wide[:, :70], *given)
            assert torch.equal(wide[:, 70:], y[:, 70:])
            both.append(wide)
        assert len(both) == 2 and torch.equal(*both)
    with pytest.raises(RuntimeError, match="of which those from 40 on are taken"):
        ops.multiply_(y[:, :70], x, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("isa")
@needs_native
def test_norms_of_groups(dtype: torch.dtype) -> None:
    x, weight = randn(9, 120, dtype=dtype), randn(40, seed=1)
    got, want = ops.rms_norm(x, weight, 1e-6), ops.op("rms_norm").reference(x, weight, 1e-6)
    torch.testing.assert_close(got, want)
    assert torch.equal(got[:, 40:80], ops.rms_norm(x[:, 40:80], weight, 1e-6))
    with pytest.raises(RuntimeError, match="groups of the 50"):
        ops.rms_norm(x, randn(50), 1e-6)
    with pytest.raises(RuntimeError, match="side by side"):
        ops.rms_norm(x[:, :80], weight, 1e-6)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "w8a8"])
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.usefixtures("isa")
@needs_native
def test_a_router_of_other_rows(tokens: int, name: str) -> None:
    given = mixtures.arguments(name)
    x, asked = mixtures.rows(tokens, name), mixtures.rows(tokens, name, seed=7)
    each = 1.0 + 0.3 * mixtures.randn(mixtures.E, seed=8)
    got = ops.experts(x, *given, asked=asked, each=each)
    want = ops.op("experts").reference(x, *given, asked=asked, each=each)
    near = 1e-5 if name == "float32" else 1e-2
    torch.testing.assert_close(got, want, rtol=near, atol=near)
    assert not torch.allclose(got, ops.experts(x, *given), rtol=near, atol=near)
    assert torch.equal(ops.experts(asked, *given, asked=asked), ops.experts(asked, *given))
    router = Dense(x.dtype).pack(mixtures.randn(mixtures.E, 48, seed=9) / 4)["weight"]
    narrow, more = mixtures.randn(tokens, 48, seed=5).to(x.dtype), (router, *given[1:])
    want = ops.op("experts").reference(x, *more, asked=narrow)
    torch.testing.assert_close(ops.experts(x, *more, asked=narrow), want, rtol=near, atol=near)
    with pytest.raises(RuntimeError, match=r"isn't the packed form of \[11, 32\]"):
        ops.experts(x, *given, asked=asked[:, :32])

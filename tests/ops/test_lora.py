"""Adapters' low-rank products: against the modules that adapters are trained as."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock import ops
from penstock.kernels import native
from penstock.ops.panels import pack_panels
from penstock.ops.registry import op

needs_native = pytest.mark.skipif(native.handle is None, reason=f"no native: {native.reason}")
K, N = 40, 50

by_rows = op("lora_add_").reference
"""Of matrices in rows, which no native kernel takes."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapters_of(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """down, up and scaling of three, alpha 16 and 8 and 1."""
    scaling = torch.tensor([16.0, 8.0, 1.0]) / rank
    return randn(3, rank, K, seed=1).to(dtype), randn(3, N, rank, seed=2).to(dtype), scaling


CHOICES = torch.tensor([0, 2, -1, 2, 1, 0, -7, 1, 1], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 8, 64])
def test_as_its_modules(rank: int, dtype: torch.dtype) -> None:
    """W x + (alpha / r) · B (A x): two linear layers without biases beside the first."""
    down, up, scaling = adapters_of(rank, dtype)
    x, y = randn(len(CHOICES), K).to(dtype), randn(len(CHOICES), N, seed=4).to(dtype)
    found = y.clone()
    by_rows(found, x, down, up, CHOICES, scaling)
    for t, a in enumerate(CHOICES.tolist()):
        if a < 0:
            assert torch.equal(found[t], y[t])
            continue
        layers = nn.Linear(K, rank, bias=False), nn.Linear(rank, N, bias=False)
        with torch.no_grad():
            for layer, matrix in zip(layers, (down[a], up[a]), strict=True):
                layer.to(dtype).weight.copy_(matrix)
            hidden = layers[0](x[t])
            change = layers[1].double()(hidden.double()) * scaling[a].double()
        want = y[t].double() + change
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(found[t].double(), want, rtol=tolerance, atol=tolerance)


def test_roundings() -> None:
    """The first product is rounded to bfloat16, the second isn't, the sum is once."""
    x = torch.tensor([[256.0, 1.0]]).bfloat16()  # 257 isn't a bfloat16: 256
    down, up = torch.ones(1, 1, 2).bfloat16(), torch.tensor([[[1.0], [1.0078125]]]).bfloat16()
    y = torch.tensor([[0.0, -256.0]]).bfloat16()
    none = torch.zeros(1, dtype=torch.int32)
    by_rows(y, x, down, up, none, torch.ones(1))
    assert y.tolist() == [[256.0, 2.0]]  # 256 · 1.0078125 = 258
    fine = torch.tensor([[-256.0]]).bfloat16()
    by_rows(fine, x, down, up[:, 1:], none, torch.tensor([1.00390625]))
    assert fine.tolist() == [[3.0]]  # 258 · 1.00390625 = 259.0078, as a bfloat16 260


def test_only_its_rows_and_columns_are_written() -> None:
    down, up, scaling = adapters_of(4, torch.float32)
    wide, x = randn(len(CHOICES), N + 9, seed=5), randn(len(CHOICES), K + 3)[:, 3:]
    whole = wide.clone()
    by_rows(whole[:, 4 : 4 + N], x, down, up, CHOICES, scaling)
    narrow = wide[:, 4 : 4 + N].clone()
    by_rows(narrow, x, down, up, CHOICES, scaling)
    assert torch.equal(whole[:, 4 : 4 + N], narrow)
    assert torch.equal(whole[:, :4], wide[:, :4])
    assert torch.equal(whole[:, 4 + N :], wide[:, 4 + N :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [8, 24])
@needs_native
def test_panels(rank: int, dtype: torch.dtype) -> None:
    """Natively: any rows together give the bits that each gives alone, and so does padding."""
    down, up, scaling = adapters_of(rank, dtype)
    x, y = randn(len(CHOICES), K).to(dtype), randn(len(CHOICES), N, seed=4).to(dtype)
    packed = [torch.stack([pack_panels(each) for each in part]) for part in (down, up)]
    found, plain = y.clone(), y.clone()
    ops.lora_add_(found, x, *packed, CHOICES, scaling)
    by_rows(plain, x, down, up, CHOICES, scaling)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance)
    alone = y.clone()
    for t in range(len(CHOICES)):
        one = slice(t, t + 1)
        ops.lora_add_(alone[one], x[one], *packed, CHOICES[one], scaling)
    assert torch.equal(found, alone)
    wider = nn.functional.pad(down, (0, 0, 0, 32)), nn.functional.pad(up, (0, 32))
    padded = [torch.stack([pack_panels(each) for each in part]) for part in wider]
    again = y.clone()
    ops.lora_add_(again, x, *padded, CHOICES, scaling)
    assert torch.equal(found, again)


@needs_native
@pytest.mark.parametrize("count", [1, 9, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [8, 160])
def test_native_is_the_reference(rank: int, dtype: torch.dtype, count: int) -> None:
    """Rows side by side or not, more than go at a time, and no others are written to."""
    down, up, scaling = adapters_of(rank, dtype)
    packed = [torch.stack([pack_panels(each) for each in part]) for part in (down, up)]
    x, y = randn(count, K + 3).to(dtype)[:, 3:], randn(count, N + 9, seed=4).to(dtype)
    generator = torch.Generator().manual_seed(rank)
    for choices in (torch.randint(-1, 3, (count,), generator=generator), torch.ones(count)):
        found, want = y.clone(), y.clone()
        given = (*packed, choices.int(), scaling)
        ops.lora_add_(found[:, 4 : 4 + N], x, *given)
        by_rows(want[:, 4 : 4 + N], x, *given)
        assert torch.equal(found, want)
        assert not torch.equal(found, y) or count == 1
        wide = [y.float(), y.float()]  # a product may come in float32
        for each, add in zip(wide, (ops.lora_add_, by_rows), strict=True):
            add(each[:, 4 : 4 + N], x, *given)
        assert torch.equal(*wide)


def test_schema() -> None:
    """What exports see: that y alone is written."""
    down, up, scaling = adapters_of(4, torch.float32)
    packed = [torch.stack([pack_panels(each) for each in part]) for part in (down, up)]
    given = (randn(9, N), randn(9, K), *packed, CHOICES, scaling)
    torch.library.opcheck(ops.lora_add_, given, test_utils=("test_schema", "test_faketensor"))
    empty = (randn(0, N), randn(0, K), *packed, CHOICES[:0], scaling)
    ops.lora_add_(*empty)


def test_what_does_not_fit() -> None:
    down, up, scaling = adapters_of(4, torch.float32)
    x, y = randn(9, K), randn(9, N)
    for given, said in (
        ((y, x, down, up, CHOICES, scaling[:2]), "of 3 adapters don't fit"),
        ((y, x, down, up[:2], CHOICES, scaling), "of 3 adapters don't fit"),
        ((y, x.bfloat16(), down, up, CHOICES, scaling), "must be of x's torch.bfloat16"),
        ((y, x, down, up, CHOICES.long(), scaling), r"must be int32 \[9\]"),
        ((y, x, down, up, CHOICES[:8], scaling), r"must be int32 \[9\]"),
        ((y[:8], x, down, up, CHOICES, scaling), "y has 8 rows"),
        ((y, x[:, :9].contiguous(), down, up, CHOICES, scaling), "x has K = 9"),
        ((y, x, down, up, CHOICES + 1, scaling), "no adapter 3 of 3"),
    ):
        with pytest.raises(RuntimeError, match=said):
            by_rows(*given)


@needs_native
def test_what_does_not_fit_natively() -> None:
    down, up, scaling = adapters_of(4, torch.float32)
    x, y = randn(9, K), randn(9, N)
    a, b = (torch.stack([pack_panels(each) for each in part]) for part in (down, up))
    for given, said in (
        ((y, x, down, up, CHOICES, scaling), "packed panels of the same adapters"),
        ((y, x, a, b[:2], CHOICES, scaling), "packed panels of the same adapters"),
        ((y, x, a, b, CHOICES, scaling[:2]), "scaling must be 3"),
        ((y.bfloat16(), x, a, b, CHOICES, scaling), "must have the dtype of x, or float32"),
        ((y.bfloat16(), x.bfloat16(), a, b, CHOICES, scaling), "x and weight must have the same"),
        ((y, x, a, b, CHOICES.long(), scaling), "adapters must be 9 contiguous int32"),
        ((y, x, a, b, CHOICES[:8], scaling), "adapters must be 9 contiguous int32"),
        ((y[:8], x, a, b, CHOICES, scaling), "y has 8 rows"),
        ((y[:, :20].contiguous(), x, a, b, CHOICES, scaling), "isn't the packed form of"),
        ((y, randn(9, 99), a, b, CHOICES, scaling), "isn't the packed form of"),
        ((y, x, a, b, CHOICES + 1, scaling), "no adapter 3 of 3"),
    ):
        with pytest.raises(RuntimeError, match=said):
            ops.lora_add_(*given)
